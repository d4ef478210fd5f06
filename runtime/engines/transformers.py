"""The transformers engine: any language model that transformers has a class for, on a GPU or the CPU.

It computes with transformers' model classes and nothing else of that library: the decode loop, the sampling and
the KV cache are our own.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import GenerationFailed, ModelLoadFailed, RuntimeClosed
from ..events import Finish
from ..prompting.prompter import Prompter
from ..request import ModelSpec, Prompt
from ..telemetry import Bytes
from .base import (
    Capabilities,
    DecodeStep,
    Drop,
    Encoded,
    EngineInfo,
    FailedStep,
    Feed,
    Loading,
    PrefillStep,
    Steps,
    Work,
)
from .sampling import Sampler
from .torch_device import name_of
from .transformers_cache import LiveCache
from .transformers_load import load_model, translate_errors
from .transformers_plan import Plan, check_memory, plan

log = logging.getLogger(__name__)

PREFILL_CHUNK = 512
"""Prompt tokens of one forward pass: the longest that an interrupt can take."""


class TransformersEngine:
    """One loaded model, its tokenizer and its cache."""

    def __init__(self, model: Any, prompter: Prompter, plan: Plan, info: EngineInfo) -> None:
        self.info = info
        self._model = model
        self._prompter = prompter
        self._plan = plan
        self._live: LiveCache | None = None
        self._is_parked = False
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._options = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})
        tensors = (*model.parameters(), *model.buffers())
        self._bytes = Bytes(weights=sum(one.numel() * one.element_size() for one in tensors))

    @property
    def bytes(self) -> Bytes:
        return self._bytes

    def encode(self, prompt: Prompt) -> Encoded:
        return self._prompter.encode(prompt)

    def generate(self, batch: Sequence[Work]) -> Steps:
        """Answers one request after another; see `Engine.generate`."""
        for index, work in enumerate(batch):
            try:
                yield from self._answer(index, work)
            finally:
                self._count()

    def _answer(self, index: int, work: Work) -> Steps:
        ids = work.encoded.token_ids or ()
        live = self._cache()
        with torch.inference_mode():
            num_cached = live.rewind(ids)
        sampler = Sampler(work.sampling, work.seed, ids, self._plan.device)
        detokenizer = self._prompter.detokenizer(work.encoded)
        stops = {entry.id: entry for entry in work.encoded.stop}
        max_tokens = work.max_tokens or self._plan.context_len - len(ids)
        by_length = "context" if len(ids) + max_tokens >= self._plan.context_len else "max_tokens"
        fed: deque[int] = deque()
        at = num_cached
        for end in self._chunk_ends(live, num_cached, len(ids)):
            logits = self._forward(live, ids[at:end])
            at = end
            if end in live.marks:
                live.snapshot()
            yield index, PrefillStep(num_done=end, num_total=len(ids), num_cached=num_cached)
        for num_tokens in range(1, max_tokens + 1):
            token = fed.popleft() if fed else self._draw(sampler, logits)
            if token is None:
                yield index, FailedStep(error=self._not_finite(num_tokens))
                return
            finish = None
            if token in stops:
                finish = Finish(reason="stop", by="token", id=token, text=stops[token].text)
            elif num_tokens == max_tokens:
                finish = Finish(reason="length", by=by_length)  # type: ignore[arg-type]
            text = "" if token in stops else detokenizer.push((token,))
            if finish is not None:
                yield index, DecodeStep(text=text + detokenizer.flush(), token_ids=(token,), finish=finish)
                return
            command = yield index, DecodeStep(text=text, token_ids=(token,))
            if isinstance(command, Drop):
                return
            if isinstance(command, Feed):
                fed.extend(command.token_ids)
            logits = self._forward(live, (token,))

    @staticmethod
    def _chunk_ends(live: LiveCache, start: int, total: int) -> Iterator[int]:
        """Where each forward pass over the prompt ends: by size, and where a state is to be kept."""
        while start < total:
            start = min([start + PREFILL_CHUNK, total, *(mark for mark in live.marks if start < mark)])
            yield start

    def _draw(self, sampler: Sampler, logits: torch.Tensor) -> int | None:
        with torch.inference_mode(), translate_errors("choosing a token"):
            return sampler.draw(logits)

    def _forward(self, live: LiveCache, ids: Sequence[int]) -> torch.Tensor:
        """The logits [vocab] in fp32 after `ids`, whose keys and values join the cache.

        Inference mode is entered for each pass, since a generator that yields inside it would leave it on in the
        thread that reads the generator.
        """
        with torch.inference_mode(), translate_errors("generating"):
            tokens = torch.tensor([ids], device=self._plan.device)
            try:
                out = self._model(input_ids=tokens, **{self._cache_name: live.cache}, **self._options)
            except BaseException:
                live.repair()
                raise
            live.ids.extend(ids)
            logits: torch.Tensor = out.logits[0, -1].float()
            return logits

    def _not_finite(self, step: int) -> GenerationFailed:
        info = self.info
        return GenerationFailed(
            f"Step {step} gave logits that are not finite ({info.engine}, attention {info.attention}, {info.dtype}). "
            "Load the model with dtype fp32 or bf16, or with attention eager."
        )

    def _cache(self) -> LiveCache:
        if self._model is None:
            raise RuntimeClosed(f"{self.info.model} was unloaded. Run the graph again.")
        if self._live is None:
            self._live = LiveCache(self._model.config, self._plan.context_len, self._plan.kv_dtype)
        return self._live

    def warm_up(self) -> None:
        """Make the buffers and run every kernel once."""
        self._forward(self._cache(), (0,))
        with torch.inference_mode():
            self._cache().rewind((1,))
        self._count()

    def _count(self) -> None:
        """Bring `bytes` up to date."""
        live = self._live
        self._bytes = Bytes(
            weights=self._bytes.weights,
            kv_cache=live.num_bytes if live else 0,
            host_copy=live.snapshot_bytes if live else 0,
        )

    def trim(self, num_bytes: int) -> int:
        before = self._bytes.device
        self._live = None
        if self._model is not None and not self._is_parked:
            self._count()
        return before - self._bytes.device

    def close(self) -> None:
        self._live = None
        self._model = None
        self._bytes = Bytes()
        gc.collect()


def footprint(spec: ModelSpec) -> Bytes:
    """The bytes that `load` will need, from headers and config."""
    return plan(spec).bytes


def load(spec: ModelSpec) -> Loading:
    settled = plan(spec)
    check_memory(settled)
    prompter = _prompter(settled)
    with contextlib.ExitStack() as stack:
        stack.callback(gc.collect)
        model, warnings = yield from load_model(settled, spec.attention)
        _check_rows(settled, model, prompter)
        info = EngineInfo(
            engine="transformers",
            model=settled.name,
            context_len=settled.context_len,
            device=str(settled.device),
            dtype=name_of(settled.dtype),
            attention=str(model.config._attn_implementation),
            kv_cache=name_of(settled.kv_dtype),
            capabilities=Capabilities(has_logits=True, has_prefix_reuse=True),
            warnings=(*settled.warnings, *warnings),
        )
        engine = TransformersEngine(model, prompter, settled, info)
        engine.warm_up()
        return engine


def _prompter(settled: Plan) -> Prompter:
    try:
        return Prompter.load(settled.model.path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ModelLoadFailed(
            f"{settled.name} has no tokenizer that can be read ({type(error).__name__}). Download tokenizer.json and "
            "tokenizer_config.json again."
        ) from error


def _check_rows(settled: Plan, model: Any, prompter: Prompter) -> None:
    """A tokenizer with more ids than the model has rows would read past the end."""
    rows = min(model.get_input_embeddings().weight.shape[0], model.get_output_embeddings().weight.shape[0])
    if prompter.vocab_size > rows:
        raise ModelLoadFailed(
            f"The tokenizer of {settled.name} has {prompter.vocab_size} ids, but the model has {rows} rows. They do "
            "not belong together: download both again from one place."
        )
