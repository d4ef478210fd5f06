"""The error tree. Every message is one readable sentence or two: what happened, with its numbers, then a remedy.

Cancelling is not an error: closing a stream raises nothing.
"""

from __future__ import annotations

import traceback


class ResidentError(Exception):
    """A fault told in a sentence that a user can act on; the root of the tree."""


class InvalidValue(ResidentError, ValueError):
    """A value in a node, a command or a settings file cannot be; the message says what it may be."""


class EngineUnavailable(ResidentError):
    """The engine cannot run here: a package, a device or a version is missing."""


class ModelNotFound(ResidentError):
    """No model stands where the spec points."""


class ModelUnsupported(ResidentError):
    """The model is whole, but this engine cannot run it; the message names one that can."""


class ModelLoadFailed(ResidentError):
    """The model's files are damaged or incomplete, or loading them failed."""


class OutOfMemory(ResidentError):
    """Weights, KV cache or scratch do not fit; the message holds the bytes."""


class TemplateFailed(ResidentError):
    """The chat template is missing, refuses the messages, or is not safe to run."""


class ContextOverflow(ResidentError):
    """Prompt and output together exceed the context."""


class GenerationFailed(ResidentError):
    """One request failed while it ran, for example by non-finite logits."""


class ServerError(ResidentError):
    """A server refused, timed out, broke off or answered nonsense."""


class RuntimeClosed(ResidentError):
    """The runtime was closed; nothing can be leased any more."""


def release_frames(error: BaseException) -> None:
    """Let go of what the frames behind an error and its causes hold: an error that is kept for later would keep the
    tensors of a half loaded model. Its lines stay for the log. For the frame that catches it."""
    chain: list[BaseException] = [error]
    for one in chain:
        traceback.clear_frames(one.__traceback__)
        chain += [cause for cause in (one.__cause__, one.__context__) if cause is not None and cause not in chain]
