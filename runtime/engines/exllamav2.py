"""ExLlamaV2 0.3.2: 4-bit weights (EXL2, GPTQ, AWQ by repack) or 16-bit ones, a preallocated KV cache, paged attention.

Options of a spec: `draft` ("ngram" or a model folder), `num_draft_tokens` (1 to 7), `max_batch` (requests at once),
`loras` (PEFT folders, one a line, each with "@ 0.8" behind it for a strength other than 1).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidValue, ModelLoadFailed, ModelNotFound, ModelUnsupported
from ..models.rope import context_len_of
from ..prompting.prompter import Prompter
from ..request import ModelSpec, Prompt
from ..telemetry import Bytes, format_bytes
from .base import Capabilities, Encoded, EngineInfo, Loading, Steps, Work
from .exllamav2_jobs import Generation, IdTokenizer
from .exllamav2_load import Parts, load_parts, num_draft_tokens, plan, resolve_device
from .exllamav2_sdk import host_stream_kept, open_sdk, translate_errors

log = logging.getLogger(__name__)

MAX_BATCH = 8
"""Requests that decode together by default; more wait for a place."""

Lora = tuple[str, float]


class ExLlamaV2Engine:
    """One loaded model with its generator. One thread uses it at a time."""

    def __init__(self, spec: ModelSpec, parts: Parts, draft: Parts | None, prompter: Prompter) -> None:
        self._spec = spec
        self._parts = parts
        self._draft = draft
        self._prompter = prompter
        self._loras: tuple[Lora, ...] = ()
        self._lora_objects: dict[Lora, Any] = {}
        self._has_kv = True
        self._is_closed = False
        self._generator: Any = self._make_generator()
        self.info = self._describe()

    def _make_generator(self) -> Any:
        parts, spec = self._parts, self._spec
        kind = spec.option("draft")
        max_batch = spec.whole_number("max_batch", MAX_BATCH, least=1) if parts.attention.is_paged else 1
        options: dict[str, Any] = {}
        if self._draft is not None:
            options = {"draft_model": self._draft.model, "draft_cache": self._draft.cache}
        elif kind:
            options = {"use_ngram_draft": True}
        if kind:
            options["num_draft_tokens"] = num_draft_tokens(spec)
        with host_stream_kept(), translate_errors("Making the generator", ModelLoadFailed):
            return parts.sdk.generator.ExLlamaV2DynamicGenerator(
                model=parts.model,
                cache=parts.cache,
                tokenizer=IdTokenizer(self._prompter.vocab_size, parts.config.vocab_size),
                max_batch_size=max_batch,
                max_chunk_size=parts.chunk_len,
                max_sampling_threads=max_batch,
                paged=parts.attention.is_paged,
                filter_background_eval=False,
                **options,
            )

    def _describe(self) -> EngineInfo:
        parts, planned = self._parts, self._parts.plan
        details: dict[str, object] = {
            "cache_len": planned.cache_len,
            "kv_bytes_computed": planned.kv_bytes,
            "prefill_chunk": parts.chunk_len,
            "is_paged": parts.attention.is_paged,
            "is_repacked": planned.needs_repack,
            "why_not_flash_attention": parts.attention.why_not_flash,
            "draft": self._spec.option("draft"),
        }
        return EngineInfo(
            engine="exllamav2",
            model=self._spec.model,
            context_len=planned.context_len,
            made_for=context_len_of(planned.config),
            device="cuda:0",
            dtype="float16",
            attention=parts.attention.name,
            kv_cache=planned.kv_cache,
            capabilities=Capabilities(can_batch=parts.attention.is_paged, has_prefix_reuse=True),
            patches=(parts.attention.hold.state.id,) if parts.attention.hold else (),
            details=details,
        )

    @property
    def bytes(self) -> Bytes:
        if self._is_closed:
            return Bytes()
        own, draft = self._parts.bytes, self._draft.bytes if self._draft else Bytes()
        return Bytes(
            weights=own.weights + draft.weights,
            kv_cache=own.kv_cache + draft.kv_cache if self._has_kv else 0,
            scratch=own.scratch + draft.scratch,
        )

    def encode(self, prompt: Prompt) -> Encoded:
        return self._prompter.encode(prompt)

    def generate(self, batch: Sequence[Work]) -> Steps:
        self._restore_kv()
        generation = Generation(
            sdk=self._parts.sdk,
            generator=self._generator,
            label=f"ExLlamaV2 with {self._parts.attention.name}",
            draft=_draft_kind(self._spec),
            num_draft_tokens=num_draft_tokens(self._spec),
            context_len=self._parts.plan.context_len,
        )
        yield from generation.run(batch, [self._prompter.detokenizer(work.encoded) for work in batch])

    def set_loras(self, loras: Sequence[Lora]) -> None:
        """Apply these (PEFT folder, strength) pairs from now on. Cached prefixes are forgotten: their keys and
        values were made without them, and the SDK's page hashes would not notice."""
        wanted = tuple(loras)
        if wanted == self._loras:
            return
        with host_stream_kept(), translate_errors("Applying LoRAs", ModelLoadFailed):
            for lora in wanted:
                if lora not in self._lora_objects:
                    self._lora_objects[lora] = self._load_lora(lora)
            self._generator.set_loras([self._lora_objects[lora] for lora in wanted])
            if not wanted:
                self._generator.current_loras = None  # an empty list fails in the output head of 0.3.2
            self._generator.reset_page_table()
        self._loras = wanted

    def _load_lora(self, lora: Lora) -> Any:
        """The SDK's object; never from the pickle that its own `from_directory` would take first."""
        folder, strength = Path(lora[0]), lora[1]
        config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        if not config.is_file():
            raise ModelNotFound(f"{folder} is no LoRA: it has no adapter_config.json. Choose a PEFT folder.")
        if not weights.is_file():
            raise ModelUnsupported(
                f"{folder} has no adapter_model.safetensors; other formats may run code when opened. Convert it."
            )
        return self._parts.sdk.package.ExLlamaV2Lora(self._parts.model, str(config), str(weights), strength)

    def trim(self, num_bytes: int) -> int:
        """Give the whole KV cache back; it comes back empty with the next request."""
        if self._is_closed or not self._has_kv:
            return 0
        before = self.bytes.kv_cache
        self._generator.reset_page_table()
        self._drop_kv()
        return before

    def _drop_kv(self) -> None:
        for parts in self._all_parts():
            cache = parts.cache
            cache.key_states = [None] * len(cache.key_states)
            cache.value_states = [None] * len(cache.value_states)
            cache.key_scales = [None] * len(cache.key_scales)
            cache.value_scales = [None] * len(cache.value_scales)
            if hasattr(cache, "temp_tensors"):
                cache.temp_tensors = {}
        self._has_kv = False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _restore_kv(self) -> None:
        if self._has_kv:
            return
        with host_stream_kept(), translate_errors("Allocating the KV cache"), torch.inference_mode():
            try:
                for parts in self._all_parts():
                    parts.cache.update_cache_tensors()
            except BaseException:
                self._drop_kv()  # the SDK takes a layer that got its values and no scales for a whole one
                raise
        self._has_kv = True

    def _all_parts(self) -> list[Parts]:
        return [self._parts, *([self._draft] if self._draft else [])]

    def close(self) -> None:
        if self._is_closed:
            return
        held = self.bytes.device
        self._is_closed = True
        for name in ("sampling_pool", "filter_pool"):
            if pool := getattr(self._generator, name, None):
                pool.shutdown(wait=False)
        self._generator = None
        self._lora_objects.clear()
        with host_stream_kept():
            for parts in self._all_parts():
                parts.free()
        log.info("ExLlamaV2 closed %s: it held %s", self._spec.model, format_bytes(held))


def _draft_kind(spec: ModelSpec) -> str | None:
    draft = spec.option("draft")
    return None if not draft else "ngram" if draft == "ngram" else "model"


def read_loras(spec: ModelSpec) -> list[Lora]:
    """The (folder, strength) pairs of a spec's `loras` option."""
    pairs = []
    for line in str(spec.option("loras") or "").splitlines():
        folder, at, strength = line.rpartition("@")
        if not line.strip():
            continue
        try:
            pairs.append((folder.strip(), float(strength)) if at else (line.strip(), 1.0))
        except ValueError:
            pairs.append((line.strip(), 1.0))
    for lora, factor in pairs:
        if not math.isfinite(factor):
            raise InvalidValue(f"The LoRA {lora} has the strength {factor}; write a number such as 0.8.")
    return pairs


def footprint(spec: ModelSpec) -> Bytes:
    """The bytes that a spec will need, from headers and config."""
    planned = plan(spec)
    drafted = plan(_draft_spec(spec, planned.context_len)) if _draft_kind(spec) == "model" else None
    return Bytes(
        weights=planned.weights_bytes + (drafted.weights_bytes if drafted else 0),
        kv_cache=planned.kv_bytes + (drafted.kv_bytes if drafted else 0),
    )


def _draft_spec(spec: ModelSpec, context_len: int) -> ModelSpec:
    """The draft model's own spec: the same length of cache, no drafting of its own, no LoRA."""
    kept = tuple((name, value) for name, value in spec.options if name in ("draft", "num_draft_tokens"))
    return replace(spec, model=str(spec.option("draft")), context_len=context_len, options=kept)


def load(spec: ModelSpec) -> Loading:
    """Load a spec; see the module's options. Raises before loading where it cannot work."""
    plan(spec)
    device = resolve_device(spec.device)
    sdk = open_sdk()
    prompter = Prompter.load(spec.model)
    draft_spec = None
    if _draft_kind(spec) == "model":
        draft_spec = _draft_spec(spec, plan(spec).context_len)
        _check_same_tokenizer(spec.model, draft_spec.model)
    parts = yield from load_parts(sdk, spec, device=device)
    draft = None
    try:
        if draft_spec is not None:
            draft = yield from load_parts(sdk, draft_spec, device=device)
        engine = ExLlamaV2Engine(spec, parts, draft, prompter)
        engine.set_loras(read_loras(spec))
    except BaseException:
        for one in (parts, draft):
            if one is not None:
                one.free()
        raise
    return engine


def _check_same_tokenizer(model: str, draft: str) -> None:
    own, other = _vocabulary(model), _vocabulary(draft)
    if own != other:
        raise ModelUnsupported(
            f"The draft model {draft} has another tokenizer ({len(other)} tokens, the model {len(own)}). "
            "Choose a smaller model of the same family, or draft ngram."
        )


def _vocabulary(folder: str) -> dict[str, int]:
    """Token -> id of a folder's tokenizer.json."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} has no tokenizer.json. Download the model again.")
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    return {**tokenizer["model"]["vocab"], **{one["content"]: one["id"] for one in tokenizer["added_tokens"]}}
