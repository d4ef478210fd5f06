"""The doors to ExLlamaV2's Python package: import it safely, keep the host's CUDA stream, name its faults."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import EngineUnavailable, GenerationFailed, OutOfMemory, ResidentError
from .exllamav2_install import advice, built_extension

log = logging.getLogger(__name__)

FLASH_MINIMUM = (2, 5, 7)
"""First flash-attn with a paged KV cache, which the SDK's dynamic generator needs."""


@dataclass(frozen=True, kw_only=True)
class Sdk:
    """The imported package. flash_fault: why flash-attn cannot serve, None where it can."""

    package: Any
    generator: Any
    attention: Any
    version: str
    flash_fault: str | None


def open_sdk() -> Sdk:
    """Import ExLlamaV2 without compiling anything, whatever state flash-attn and xformers are in.

    The package imports both at its own import and dies of a broken one; its environment variables for leaving them
    out are set only while it is imported. Raises EngineUnavailable with what to install.
    """
    flash_fault = find_flash_fault()
    if extension := built_extension():
        sys.path.insert(0, str(extension.parent))
    switches = {"EXLLAMA_NO_XFORMERS": "1", **({"EXLLAMA_NO_FLASH_ATTN": "1"} if flash_fault else {})}
    try:
        if not _has_extension():
            raise EngineUnavailable(advice())
        with _environment(switches):
            package = importlib.import_module("exllamav2")
            generator = importlib.import_module("exllamav2.generator")
            attention = importlib.import_module("exllamav2.attn")
            version = str(importlib.import_module("exllamav2.version").__version__)
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineUnavailable(f"ExLlamaV2 cannot be imported ({error}). {advice()}") from error
    finally:
        if extension:
            sys.path.remove(str(extension.parent))
    if flash_fault is None and not attention.has_flash_attn_with_paged:
        flash_fault = "ExLlamaV2 was imported without it before; restart to use it"
    return Sdk(package=package, generator=generator, attention=attention, version=version, flash_fault=flash_fault)


def _has_extension() -> bool:
    return "exllamav2_ext" in sys.modules or importlib.util.find_spec("exllamav2_ext") is not None


def find_flash_fault() -> str | None:
    """Why flash-attn cannot be imported and used here; None where it can. Numbers are probed later."""
    if "flash_attn" not in sys.modules and importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    try:
        flash = importlib.import_module("flash_attn")
        version = str(flash.__version__)
        importlib.import_module("flash_attn_2_cuda")
        _ = flash.flash_attn_func, flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache
    except Exception as error:
        return f"flash-attn is broken ({type(error).__name__}: {error})"
    if tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < FLASH_MINIMUM:
        return f"flash-attn {version} is older than {'.'.join(map(str, FLASH_MINIMUM))}"
    return None


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def host_stream_kept(*, must_wait: bool = True) -> Iterator[None]:
    """Run SDK calls in the block on the SDK's stream; the thread's device and stream are the host's again after it.

    The SDK leaves a stream of its own in place: a diffusion model that samples next in this thread would run, and
    allocate, on it. It also puts it in place only halfway through a forward pass, so it is put there before.

    must_wait: work on either stream comes after what the other was given; false between the steps of one generation,
               of which nothing but the SDK sees anything
    """
    if not (torch.cuda.is_initialized() or torch.cuda.is_available()):  # type: ignore[no-untyped-call]
        yield
        return
    host = torch.cuda.current_stream()
    own = _own_stream(host.device_index)
    if own is not None:
        if must_wait:
            own.wait_stream(host)
        torch.cuda.set_stream(own)
    try:
        yield
    finally:
        left = torch.cuda.current_stream() if must_wait else host
        torch.cuda.set_stream(host)  # its device is the current one again with it
        if left != host:
            host.wait_stream(left)


def _own_stream(device: int) -> torch.cuda.Stream | None:
    """The SDK's stream on a device; None before it has made one."""
    find = getattr(sys.modules.get("exllamav2.device"), "get_device_stream", None)
    return find(device) if find else None


@contextlib.contextmanager
def translate_errors(doing: str, kind: type[ResidentError] = GenerationFailed) -> Iterator[None]:
    """Turn the SDK's exceptions into ours, chained; ours pass. kind: what a fault that is no lack of memory becomes."""
    try:
        yield
    except ResidentError:
        raise
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(f"{doing}: the device's memory ran out. Lower context_len or use kv_cache q4.") from error
    except (AssertionError, RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
        if "Insufficient VRAM" in str(error) or "out of memory" in str(error):
            raise OutOfMemory(
                f"{doing}: the model and its KV cache do not fit. Lower context_len or use kv_cache q4."
            ) from error
        raise kind(f"{doing}: ExLlamaV2 failed ({type(error).__name__}: {error}).") from error
