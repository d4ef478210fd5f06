"""The 26.9 B model: load time, decode speed beside the bare SDK in the same run, memory, and transformers in bf16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from exl2_checks import draw_ids
from exl2_models import BIG, config
from exl2_run import answer, bare, bare_generator, opened

Row = dict[str, Any]
NUM_TOKENS = 128


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a device copy of 4 GB."""
    one = torch.empty(2**31, dtype=torch.float16, device="cuda")
    two = torch.empty_like(one)
    two.copy_(one)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        two.copy_(one)
    torch.cuda.synchronize()
    return 5 * 2 * one.nbytes / (time.perf_counter() - began)


def decode(
    model: Path, kv_caches: Sequence[str], lengths: tuple[int, ...], has_time: Callable[[float], bool]
) -> Iterator[Row]:
    """Rows per cache precision and prompt length; the pack and the bare SDK take turns on the same loaded model."""
    vocab = 49000
    bandwidth = copy_bandwidth()
    yield {"kind": "device", "name": torch.cuda.get_device_name(), "copy_bytes_per_s": bandwidth, "ok": True}
    for kv_cache in kv_caches:
        if not has_time(60):
            yield {"kind": "skipped", "what": f"decode {kv_cache}: no time left", "ok": True}
            return
        with opened(model, context_len=33792, kv_cache=kv_cache) as engine:
            parts = engine._parts
            used = torch.cuda.mem_get_info()
            yield {"kind": "load", "kv_cache": kv_cache, "load_s": engine.load_s, "bytes": engine.bytes.as_dict(),
                   "allocated": torch.cuda.memory_allocated(), "device_used": used[1] - used[0],
                   "computed_kv": engine.info.details["kv_bytes_computed"],
                   "attention": engine.info.attention,
                   "ok": engine.bytes.kv_cache == engine.info.details["kv_bytes_computed"]}  # fmt: skip
            generator = bare_generator(engine)
            answer(engine, [draw_ids(64, vocab)], 8)
            engine._generator.reset_page_table()
            bare(generator, parts.sdk, [draw_ids(64, vocab)], 8)
            for length in lengths:
                if not has_time(40):
                    break
                yield _turns(engine, generator, kv_cache, length, vocab, bandwidth)
            yield _warm(engine, kv_cache, lengths[-1], vocab)
            yield from _eight(engine, generator, kv_cache, vocab)
            generator.sampling_pool.shutdown(wait=False)
            del generator


def _turns(engine: Any, generator: Any, kv_cache: str, length: int, vocab: int, bandwidth: float) -> Row:
    parts, ours, theirs, ttft, bare_ttft = engine._parts, [], [], [], []
    num_turns = 7 if length <= 8192 else 5
    for turn in range(num_turns):
        prompt = draw_ids(length, vocab, turn)
        for who in ("pack", "bare") if turn % 2 else ("bare", "pack"):
            if who == "pack":
                engine._generator.reset_page_table()
                [end] = answer(engine, [prompt], NUM_TOKENS)
                ours.append(end.timings.decode_tokens_per_s)
                ttft.append(end.timings.ttft_s)
            else:
                generator.reset_page_table()
                first, rest, num = bare(generator, parts.sdk, [prompt], NUM_TOKENS)
                theirs.append((num - 1) / rest)
                bare_ttft.append(first)
    speed, bare_speed = statistics.median(ours), statistics.median(theirs)
    share = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    per_token = engine.bytes.weights + parts.plan.kv_bytes * length / parts.plan.cache_len
    return {"kind": "decode", "kv_cache": kv_cache, "prompt": length, "num_tokens": NUM_TOKENS,
            "tokens_per_s": speed, "bare_tokens_per_s": bare_speed, "share_of_bare": share,
            "all": ours, "bare_all": theirs, "ttft_s": statistics.median(ttft),
            "bare_ttft_s": statistics.median(bare_ttft), "ceiling_tokens_per_s": bandwidth / per_token,
            "ok": share >= 0.97}  # fmt: skip


def _warm(engine: Any, kv_cache: str, length: int, vocab: int) -> Row:
    prompt = draw_ids(length, vocab, 77)
    engine._generator.reset_page_table()
    [cold] = answer(engine, [prompt], 8)
    [warm] = answer(engine, [prompt], 8)
    return {"kind": "warm-prefix", "kv_cache": kv_cache, "prompt": length, "cold_ttft_s": cold.timings.ttft_s,
            "ttft_s": warm.timings.ttft_s, "num_cached": warm.num_cached_tokens,
            "ok": (warm.num_cached_tokens or 0) > length - 300}  # fmt: skip


def _eight(engine: Any, generator: Any, kv_cache: str, vocab: int) -> Iterator[Row]:
    """Tokens after the first of each of eight requests, by the seconds from the first token to the last."""
    ours, theirs, ttft, bare_ttft = [], [], [], []
    for turn in range(7):
        prompts = [draw_ids(512, vocab, 200 + 8 * turn + one) for one in range(8)]
        for who in ("pack", "bare") if turn % 2 else ("bare", "pack"):
            if who == "pack":
                engine._generator.reset_page_table()
                marks = [end.timings for end in answer(engine, prompts, NUM_TOKENS)]
                first, last = min(one.arrivals[0][0] for one in marks), max(one.arrivals[-1][0] for one in marks)
                ours.append(8 * NUM_TOKENS / (last - first))
                ttft.append(min(one.ttft_s for one in marks))
            else:
                generator.reset_page_table()
                bare_first, rest, num = bare(generator, engine._parts.sdk, prompts, NUM_TOKENS)
                theirs.append(num / rest)
                bare_ttft.append(bare_first)
    engine._generator.reset_page_table()
    share = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    yield {"kind": "eight-at-once", "kv_cache": kv_cache, "tokens_per_s": statistics.median(ours),
           "bare_tokens_per_s": statistics.median(theirs), "share_of_bare": share, "all": ours, "bare_all": theirs,
           "ttft_s": statistics.median(ttft), "bare_ttft_s": statistics.median(bare_ttft),
           "ok": share >= 0.97}  # fmt: skip


def transformers_bf16(lengths: tuple[int, ...], has_time: Callable[[float], bool]) -> Iterator[Row]:
    """The same shape in transformers, bf16: the dynamic cache, then the static one compiled if time is left."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**{**config(BIG, 36864, is_tied=False), "dtype": "bfloat16"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    model = model.to_empty(device="cuda")
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        if one.ndim > 1:
            one.data.normal_(0, one.shape[-1] ** -0.5)
        elif "norm" in name:
            one.data.fill_(1.0)
    rotary = model.model.rotary_emb
    with torch.device("cuda"):
        fresh = type(rotary)(settings)
    rotary.load_state_dict(fresh.state_dict())
    for name, buffer in fresh.named_buffers():
        setattr(rotary, name, buffer)
    model.eval()
    for mode in ("dynamic", "static compiled"):
        for length in lengths:
            if not has_time(40 if mode == "dynamic" else 150):
                return
            more = {} if mode == "dynamic" else {"cache_implementation": "static", "max_cache_len": 9000}
            ids = torch.tensor([draw_ids(length, 49000)], device="cuda")

            def timed(num: int, ids: torch.Tensor = ids, more: dict[str, Any] = more) -> float:
                torch.cuda.synchronize()
                began = time.perf_counter()
                with torch.inference_mode():
                    model.generate(ids, max_new_tokens=num, min_new_tokens=num, do_sample=False, **more)
                torch.cuda.synchronize()
                return time.perf_counter() - began

            warm = timed(8)
            short, long = timed(8), timed(72)
            yield {"kind": "transformers-bf16", "cache": mode, "prompt": length, "tokens_per_s": 64 / (long - short),
                   "first_call_s": warm, "allocated": torch.cuda.memory_allocated(), "ok": True}  # fmt: skip
