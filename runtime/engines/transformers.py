"""The transformers engine: any language model that transformers has a class for, on a GPU or the CPU.

It computes with transformers' model classes and nothing else of that library: the decode loop, the sampling and
the KV cache are our own.
"""

from __future__ import annotations

import gc
import inspect
import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import GenerationFailed, ModelLoadFailed, RuntimeClosed, release_frames
from ..events import Finish, LoadProgress
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
from .parking import Parking
from .precision import matmul_sums
from .sampling import Sampler
from .torch_device import name_of
from .transformers_cache import LiveCache
from .transformers_gguf import load_gguf
from .transformers_load import load_folder, translate_errors
from .transformers_plan import Plan, plan

log = logging.getLogger(__name__)

PREFILL_CHUNK = 512
"""Prompt tokens of one forward pass: the longest that an interrupt can take."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.*", "spiece.model", "merges.txt")


class TransformersEngine:
    """One loaded model, its tokenizer and its cache."""

    def __init__(self, model: Any, prompter: Prompter, plan: Plan, info: EngineInfo) -> None:
        self.info = info
        self._model = model
        self._prompter = prompter
        self._plan = plan
        self._parking = Parking(model)
        self._live = LiveCache(model.config, plan.context_len, plan.kv_dtype, plan.prefix_bytes)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._options = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})
        self._bytes = Bytes()

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
            except GenerationFailed as error:
                release_frames(error)
                yield index, FailedStep(error=error)
            finally:
                self._count()

    def _answer(self, index: int, work: Work) -> Steps:
        ids = work.encoded.token_ids
        if not ids:
            raise GenerationFailed("The prompt came to no tokens at all. Write something into it.")
        num_cached = self._rewind(ids)
        stops = {entry.id: entry for entry in work.encoded.stop}
        sampler = Sampler(work.sampling, work.seed, ids, self._plan.device)
        detokenizer = self._prompter.detokenizer(work.encoded)
        max_tokens = work.max_tokens or self._plan.context_len - len(ids)
        fed: deque[int] = deque()
        at = num_cached
        for end in self._chunk_ends(num_cached, len(ids)):
            logits = self._forward(ids[at:end])
            at = end
            yield index, PrefillStep(num_done=end, num_total=len(ids), num_cached=num_cached)
        for num_tokens in range(1, max_tokens + 1):
            token = self._fed_or_drawn(fed, sampler, logits)
            if token is None:
                raise self._not_finite(num_tokens)
            finish = None
            if token in stops:
                finish = Finish(reason="stop", by="token", id=token, text=stops[token].text)
            elif num_tokens == max_tokens:
                is_full = len(ids) + max_tokens >= self._plan.context_len
                finish = Finish(reason="length", by="context" if is_full else "max_tokens")
            text = "" if token in stops else detokenizer.push((token,))
            if finish is not None:
                yield index, DecodeStep(text=text + detokenizer.flush(), token_ids=(token,), finish=finish)
                return
            command = yield index, DecodeStep(text=text, token_ids=(token,))
            if isinstance(command, Drop):
                return
            if isinstance(command, Feed):
                fed.extend(command.token_ids)
            logits = self._forward((token,))

    def _chunk_ends(self, start: int, total: int) -> Iterator[int]:
        """Where each forward pass over the prompt ends: by size, and where a state is to be kept."""
        while start < total:
            start = min([start + PREFILL_CHUNK, total, *(mark for mark in self._live.marks if start < mark)])
            yield start

    def _rewind(self, ids: Sequence[int]) -> int:
        """Bring the cache to the longest known prefix of `ids`; return its length."""
        if self._model is None:
            raise RuntimeClosed(f"{self.info.model} was unloaded. Run the graph again.")
        if not self._live.is_ready:
            self.warm_up()
        with torch.inference_mode(), translate_errors("looking up the cache", GenerationFailed):
            return self._live.rewind(ids)

    @staticmethod
    def _fed_or_drawn(fed: deque[int], sampler: Sampler, logits: torch.Tensor) -> int | None:
        with torch.inference_mode(), translate_errors("choosing a token", GenerationFailed):
            if not fed:
                return sampler.draw(logits)
            sampler.saw(fed[0])
            return fed.popleft()

    def _forward(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits [vocab] in fp32 after `ids`, whose keys and values join the cache.

        Inference mode is entered for each pass, since a generator that yields inside it would leave it on in the
        thread that reads the generator.
        """
        live = self._live
        with torch.inference_mode(), translate_errors("generating", GenerationFailed), matmul_sums(self._plan.sums):
            tokens = torch.tensor([ids], device=self._plan.device)
            try:
                out = self._model(input_ids=tokens, **{self._cache_name: live.cache}, **self._options)
            except BaseException:
                live.repair()
                raise
            live.ids.extend(ids)
            if len(live.ids) in live.marks:
                live.snapshot()
            logits: torch.Tensor = out.logits[0, -1].float()
            return logits

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """What the model says after each of `ids`, [len(ids), vocab] in fp32: for probes of its attention."""
        self._rewind(ids)
        with torch.inference_mode(), translate_errors("probing", GenerationFailed):
            self._live.start_over()
            rows = []
            try:
                for at in range(0, len(ids), PREFILL_CHUNK):
                    tokens = torch.tensor([ids[at : at + PREFILL_CHUNK]], device=self._plan.device)
                    out = self._model(input_ids=tokens, use_cache=True, **{self._cache_name: self._live.cache})
                    rows.append(out.logits[0])
            except BaseException:
                self._live.repair()
                raise
            self._live.ids.extend(ids)
            return torch.cat(rows).float()

    def _not_finite(self, step: int) -> GenerationFailed:
        info = self.info
        return GenerationFailed(
            f"Step {step} gave logits that are not finite ({info.engine}, attention {info.attention}, {info.dtype}). "
            "Load the model with dtype fp32 or bf16, or with attention eager."
        )

    def warm_up(self) -> None:
        """Make the buffers, and run every kernel once."""
        self._forward((0,))
        with torch.inference_mode():
            self._live.start_over()
        self._count()

    def _count(self) -> None:
        """Bring `bytes` up to date."""
        if self._model is None:
            self._bytes = Bytes()
            return
        is_parked = self._parking.is_parked
        self._bytes = Bytes(
            weights=0 if is_parked else self._parking.num_bytes,
            kv_cache=self._live.num_bytes,
            host_copy=self._live.host_bytes + self._parking.host_bytes,
        )

    def trim(self, num_bytes: int) -> int:
        """Free the buffers; on a GPU the prompt in them moves to host memory first."""
        if self._model is None:
            return 0
        before = self._bytes
        if self._plan.device.type == "cpu":
            self._live.forget()
        else:
            with torch.inference_mode():
                self._live.keep()
        self._live.drop_buffers()
        self._count()
        kept = before.host_copy - self._bytes.host_copy if self._plan.device.type == "cpu" else 0
        return before.device - self._bytes.device + kept

    @property
    def is_in_place(self) -> bool:
        return self._parking.is_in_place

    def park(self, max_bytes: int) -> bool:
        if self._model is None or self._plan.device.type == "cpu":
            return False
        if not self._parking.park(max_bytes):
            return False
        self.trim(self._bytes.kv_cache)
        return True

    def unpark(self) -> Generator[LoadProgress, None, None]:
        try:
            yield from self._parking.unpark()
        finally:
            self._count()

    def forget(self) -> int:
        """Drop what host memory keeps: the copy of the weights, and prefixes. Parked, nothing."""
        if self._model is None or self._parking.is_parked:
            return 0
        before = self._bytes.host_copy
        self._parking.forget()
        self._live.forget()
        self._count()
        return before - self._bytes.host_copy

    def close(self) -> None:
        if self._model is None:
            return
        self._parking.forget()
        self._live.forget()
        self._live.drop_buffers()
        self._model = self._parking = None  # type: ignore[assignment]
        self._count()
        gc.collect()


def footprint(spec: ModelSpec) -> Bytes:
    """The bytes that `load` will need, from headers and config."""
    return plan(spec).bytes


def load(spec: ModelSpec) -> Loading:
    settled = plan(spec)
    prompter = _prompter(settled)
    try:
        load_weights = load_gguf if settled.model.format == "gguf" else load_folder
        model, warnings = yield from load_weights(settled, spec.attention)
        _check_rows(settled, model, prompter)
        info = EngineInfo(
            engine="transformers",
            model=settled.name,
            context_len=settled.context_len,
            made_for=settled.model.context_len,
            device=str(settled.device),
            dtype=name_of(settled.dtype),
            attention=str(model.config._attn_implementation),
            kv_cache=name_of(settled.kv_dtype),
            capabilities=Capabilities(has_logits=True, has_prefix_reuse=True),
            warnings=(*settled.warnings, *warnings),
            details={"num_offloaded_layers": _num_elsewhere(model, settled.device)},
        )
        engine = TransformersEngine(model, prompter, settled, info)
        engine.warm_up()
        return engine
    except BaseException:
        model = engine = None
        gc.collect()
        raise


def _num_elsewhere(model: Any, device: torch.device) -> int:
    """Layers with a weight off the device."""
    layers = next((one for one in model.modules() if isinstance(one, torch.nn.ModuleList)), [model])
    return sum(any(weight.device.type != device.type for weight in layer.parameters()) for layer in layers)


def _prompter(settled: Plan) -> Prompter:
    path = Path(settled.model.path)
    if path.is_dir() and not any(found for name in TOKENIZER_FILES for found in path.glob(name)):
        raise ModelLoadFailed(
            f"{settled.name} has no tokenizer. Download its tokenizer.json and tokenizer_config.json too."
        )
    return Prompter.load(settled.model.path)


def _check_rows(settled: Plan, model: Any, prompter: Prompter) -> None:
    """A tokenizer with more ids than the model has rows would read past the end."""
    rows = min(model.get_input_embeddings().weight.shape[0], model.get_output_embeddings().weight.shape[0])
    if prompter.vocab_size > rows:
        raise ModelLoadFailed(
            f"The tokenizer of {settled.name} has {prompter.vocab_size} ids, but the model has {rows} rows. They do "
            "not belong together: download both again from one place."
        )
