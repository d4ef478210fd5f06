"""The engine contract and the numeric proofs on a real GPU, each giving a row with `ok`."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from exl2_run import FixedPrompts, answer, ask, opened, output_ids
from safetensors.torch import load_file, save_file

from runtime.engines.base import DecodeStep, Feed, Work
from runtime.engines.exllamav2_attention import NAMES
from runtime.engines.exllamav2_sdk import host_stream_kept
from runtime.errors import GenerationFailed
from runtime.events import Failed
from runtime.models.repack import find_differences, repack
from runtime.prompting.prompter import Prompter
from runtime.request import GREEDY, Prompt
from runtime.stream import stream

Row = dict[str, Any]
GAP = 0.05
"""Two runs in 16 bit may part where the best two logits are closer than this share of the logits' spread."""

AGREEMENT = {"fp16": 0.999, "q8": 0.97, "q6": 0.92, "q4": 0.84}
"""Least share of equal best tokens, a little under what a real model of 135 M parameters gave."""


def draw_ids(num: int, vocab: int, seed: int = 0) -> list[int]:
    return torch.randint(3, vocab, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_after(engine: Any, ids: Sequence[int]) -> torch.Tensor:
    """[vocab] float logits after `ids`, by plain forward passes over an empty cache."""
    parts = engine._parts
    parts.cache.current_seq_len = 0
    with host_stream_kept(), torch.inference_mode():
        out = parts.model.forward(torch.tensor([list(ids)]), parts.cache, last_id_only=True)
    engine._generator.reset_page_table()
    return out[0, -1, : parts.config.vocab_size].float().cpu()


def divergence(engine: Any, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> Row | None:
    """Where two outputs part, and how close the best two logits were there; None where they are equal."""
    at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None:
        return None if len(one) == len(other) else {"at": min(len(one), len(other)), "gap": None, "is_explained": False}
    logits = logits_after(engine, [*prompt, *one[:at]])
    top = logits.topk(2).values
    gap = float((top[0] - top[1]) / logits.std())
    return {"at": at, "gap": round(gap, 4), "is_explained": gap < GAP}


def compared(engine: Any, prompts: Sequence[Sequence[int]], ones: list[list[int]], others: list[list[int]]) -> Row:
    found = [divergence(engine, *three) for three in zip(prompts, ones, others, strict=True)]
    parted = [one for one in found if one]
    return {
        "num_prompts": len(prompts),
        "num_equal": len(prompts) - len(parted),
        "divergences": parted[:8],
        "ok": all(one["is_explained"] for one in parted),
    }


def manual(engine: Any, ids: Sequence[int], num: int) -> list[int]:
    """Greedy decoding by the model's own forward passes, one token at a time."""
    parts, out = engine._parts, []
    parts.cache.current_seq_len = 0
    new = torch.tensor([list(ids)])
    with host_stream_kept(), torch.inference_mode():
        for _ in range(num):
            logits = parts.model.forward(new, parts.cache, last_id_only=True)[0, -1, : parts.config.vocab_size]
            out.append(int(logits.float().argmax()))
            new = torch.tensor([[out[-1]]])
    engine._generator.reset_page_table()
    return out


def contract(model: Path, vocab: int, attention: str) -> Iterator[Row]:
    """The rows of the engine contract for one attention."""
    with opened(model, context_len=4096, attention=attention) as engine:  # a process loads kernels once, and keeps them
        output_ids(engine, [draw_ids(300, vocab)], 4)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    stream_before = torch.cuda.current_stream()
    prompts = [draw_ids(length, vocab, length) for length in (5, 40, 300, 700, 257, 64, 9, 511)]
    with opened(model, context_len=4096, attention=attention) as engine:
        base = {"kind": "contract", "attention": engine.info.attention, "model": model.name}
        computed, measured = engine.info.details["kv_bytes_computed"], engine.bytes.kv_cache
        yield {**base, "what": "KV bytes", "computed": computed, "measured": measured, "ok": computed == measured}
        singles = [output_ids(engine, [ids], 48)[0] for ids in prompts]
        by_hand = [manual(engine, ids, 48) for ids in prompts[:4]]
        yield {**base, "what": "greedy is the manual loop", **compared(engine, prompts[:4], by_hand, singles[:4])}
        together = output_ids(engine, prompts, 48)
        yield {**base, "what": "a list is its single requests", **compared(engine, prompts, singles, together)}
        engine._generator.reset_page_table()
        [cold] = answer(engine, [[*prompts[3], 3, 4]], 4)
        engine._generator.reset_page_table()
        [_] = answer(engine, [prompts[3]], 4)
        [warm] = answer(engine, [[*prompts[3], 3, 4]], 4)
        again = output_ids(engine, [prompts[3]], 48)
        row = compared(engine, prompts[3:4], singles[3:4], again)
        yield {**base, "what": "a cached prefix", "num_cached": warm.num_cached_tokens, "cold": cold.num_cached_tokens,
               **row, "ok": row["ok"] and (warm.num_cached_tokens or 0) >= 512}  # fmt: skip
        stop = singles[1][10]
        [ids] = output_ids(engine, [prompts[1]], 48, stop_ids=[stop])
        expected = ids.index(stop) + 1 if stop in ids else 48  # AWQ kernels add in any order, so it may not come
        yield {**base, "what": "a stop id", "num_tokens": len(ids), "expected": expected, "has_come": stop in ids,
               "ok": len(ids) == expected}  # fmt: skip
        running = stream(FixedPrompts(engine), [ask(prompts[2], 400), ask(prompts[3], 400)])
        list(itertools.islice(running, 12))
        running.close()
        pages = len(engine._generator.unreferenced_pages) == engine._generator.max_pages
        after = output_ids(engine, [prompts[2]], 48)
        row = compared(engine, prompts[2:3], singles[2:3], after)
        yield {**base, "what": "cancel", "are_pages_free": pages, **row, "ok": row["ok"] and pages}
        yield {**base, "what": "feed", **_feed(engine, prompts[2])}
        yield {**base, "what": "NaN weights", **_nan(engine, prompts[0])}
        held = engine.bytes.kv_cache
        free = torch.cuda.mem_get_info()[0]
        freed = engine.trim(1)
        gained = torch.cuda.mem_get_info()[0] - free
        row = compared(engine, prompts[2:3], singles[2:3], output_ids(engine, [prompts[2]], 48))
        yield {**base, "what": "trim", "freed": freed, "device_gained": gained, **row,
               "ok": row["ok"] and freed == held and gained > 0.9 * held}  # fmt: skip
        yield {**base, "what": "the host's stream is back", "ok": torch.cuda.current_stream() == stream_before}
    lost = before - torch.cuda.mem_get_info()[0]
    engine.close()
    yield {**base, "what": "memory after close", "bytes_not_returned": lost, "ok": lost < 300e6}


def _feed(engine: Any, prompt: list[int]) -> Row:
    work = Work(
        encoded=FixedPrompts(engine).encode(Prompt.of(" ".join(map(str, prompt)))),
        sampling=GREEDY,
        max_tokens=24,
        seed=0,
    )
    steps, out, command = engine.generate([work]), [], None
    while True:
        try:
            _, step = steps.send(command)
        except StopIteration:
            break
        command = None
        if isinstance(step, DecodeStep):
            out += step.token_ids
            command = Feed(token_ids=(7, 8, 9)) if len(out) == 5 else None
    expected = [*out[:5], 7, 8, 9, *manual(engine, [*prompt, *out[:5], 7, 8, 9], 16)]
    return compared(engine, [prompt], [expected], [out])


def _nan(engine: Any, prompt: list[int]) -> Row:
    norm = engine._parts.model.modules[-2]
    with torch.inference_mode():
        kept = norm.weight.data.clone()
        norm.weight.data.fill_(float("nan"))
    ends = list(stream(FixedPrompts(engine), [ask(prompt, 8)]))
    with torch.inference_mode():
        norm.weight.data.copy_(kept)
    error = ends[-1].error if isinstance(ends[-1], Failed) else None
    return {"error": str(error), "ok": isinstance(error, GenerationFailed) and "output token 1" in str(error)}


def drafting(model: Path, vocab: int) -> Iterator[Row]:
    """Drafting by n-grams and by a draft model (the model itself): the same text, exact length, counts."""
    prompt = draw_ids(6, vocab) * 40
    with opened(model, context_len=2048) as engine:
        plain = output_ids(engine, [prompt], 100)
    for name, draft in (("ngram", "ngram"), ("itself", str(model))):
        with opened(model, context_len=2048, options=(("draft", draft),)) as engine:
            row = compared(engine, [prompt], plain, output_ids(engine, [prompt], 100))
            [end] = answer(engine, [prompt], 100)
            yield {"kind": "drafting", "by": name, **row, "draft": end.details.get("draft"),
                   "num_tokens": end.num_output_tokens, "ok": row["ok"] and end.num_output_tokens == 100}  # fmt: skip


LORA_RANK, LORA_ALPHA = 8, 16.0


def lora(model: Path, vocab: int, folder: Path) -> Iterator[Row]:
    """A LoRA of random weights beside the same model with it merged; without it the old text comes back."""
    adapter, merged, strength = folder / "lora", folder / "merged", 0.5
    shutil.copytree(model, merged, dirs_exist_ok=True)
    adapter.mkdir(exist_ok=True)
    tensors, parts = load_file(merged / "model.safetensors"), {}
    draw = torch.Generator().manual_seed(3)
    for name, weight in tensors.items():
        if not name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
            continue
        down = torch.randn((LORA_RANK, weight.shape[1]), generator=draw) * weight.shape[1] ** -0.5
        up = torch.randn((weight.shape[0], LORA_RANK), generator=draw) * 0.3
        base = f"base_model.model.{name.removesuffix('.weight')}"
        parts |= {f"{base}.lora_A.weight": down.half(), f"{base}.lora_B.weight": up.half()}
        tensors[name] = (
            weight.float() + strength * LORA_ALPHA / LORA_RANK * (up.half().float() @ down.half().float())
        ).half()
    save_file(tensors, merged / "model.safetensors")
    save_file(parts, adapter / "adapter_model.safetensors")
    settings = {"r": LORA_RANK, "lora_alpha": LORA_ALPHA, "peft_type": "LORA", "target_modules": []}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    prompts = [draw_ids(length, vocab, length) for length in (9, 64, 300, 600)]
    with opened(merged, context_len=2048) as engine:
        wanted = output_ids(engine, prompts, 48)
    with opened(model, context_len=2048) as engine:
        before = output_ids(engine, prompts, 48)
        engine.set_loras([(str(adapter), strength)])
        row = compared(engine, prompts, wanted, output_ids(engine, prompts, 48))
        engine.set_loras([])
        after = output_ids(engine, prompts, 48)
    num_changed = sum(one != other for one, other in zip(before, wanted, strict=True))
    yield {"kind": "lora", **row, "num_changed_by_it": num_changed, "is_gone_without_it": before == after,
           "ok": row["ok"] and num_changed == len(prompts) and before == after}  # fmt: skip


def causality(model: Path, vocab: int) -> Iterator[Row]:
    """Change token 500 of 512 inside one prefill: how far the logits before it move, per attention and unpatched."""
    ids = torch.tensor([draw_ids(512, vocab)])
    other = ids.clone()
    other[0, 500] = (other[0, 500] + 1) % vocab
    exact = _exact_logits(model, ids)

    def row(name: str, forward: Any, remedy: bool) -> Row:
        one, two = (forward(x)[0, :, :vocab].float().cpu() for x in (ids, other))
        moved = float((one - two).abs()[:500].max())
        error = float((one - exact).norm() / exact.norm())
        return {"kind": "causality", "attention": name, "largest_change_before": moved, "relative_error": error,
                "ok": (moved < 0.05 and error < 0.02) if remedy else moved > 0.3}  # fmt: skip

    for name in NAMES[1:]:
        with opened(model, context_len=1024, attention=name) as engine:

            def forward(x: torch.Tensor, parts: Any = engine._parts) -> torch.Tensor:
                parts.cache.current_seq_len = 0
                with torch.inference_mode():
                    return parts.model.forward(x, parts.cache)

            yield {**row(name, forward, True), "patches": list(engine.info.patches)}
            sdk, folder = engine._parts.sdk.package, engine._parts.config.model_dir
    config = sdk.ExLlamaV2Config(folder)
    config.no_flash_attn, config.no_xformers, config.no_sdpa, config.max_seq_len = True, True, False, 1024
    raw = sdk.ExLlamaV2(config)
    cache = sdk.ExLlamaV2Cache(raw, max_seq_len=1024, lazy=True)
    raw.load_autosplit(cache)

    def unpatched(x: torch.Tensor) -> torch.Tensor:
        cache.current_seq_len = 0
        with torch.inference_mode():
            return raw.forward(x, cache)

    yield row("sdpa without a remedy (expected to be wrong)", unpatched, False)
    raw.unload()


def _exact_logits(model: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").cuda()
    with torch.inference_mode():
        logits = reference(ids.cuda()).logits[0].cpu()
    del reference
    torch.cuda.empty_cache()
    return logits


PROMPTS = [
    f"Describe {what} in one vivid paragraph for a painter."
    for what in (
        *(
            "a cat on a windowsill",
            "a street at night",
            "an old fisherman",
            "a storm over the sea",
            "a market in spring",
        ),
        *("a lighthouse", "a forest after rain", "a train station", "two friends at a table", "a castle on a hill"),
        *("a desert road", "a robot that paints", "snow in a small town", "a violin maker", "a city of glass"),
        *("a garden with a pond", "the moon above mountains", "a library", "a baker at dawn", "a ship in the harbour"),
    )
]


def text_prompts(model: Path) -> list[list[int]]:
    """The prompts above through the model's own chat template."""
    prompter = Prompter.load(str(model))
    return [list(prompter.encode(Prompt.of(text)).token_ids or ()) for text in PROMPTS]


def text_ids(model: Path, num: int) -> list[int]:
    """The first ids of this repository's own prose."""
    root = Path(__file__).parents[1]
    text = "\n".join(
        file.read_text(encoding="utf-8") for file in sorted([*root.glob("*.md"), *root.glob("web/docs/*.md")])
    )
    prompter = Prompter.load(str(model))
    return list(prompter.encode(Prompt.of(text)).token_ids or ())[:num]


def equality(
    awq: Path, half: Path, vocab: int, cache: Path, prompts: Sequence[Sequence[int]] | None = None
) -> Iterator[Row]:
    """AWQ repacked against the 16-bit folder of the same weights: 256 tokens on 20 prompts, and the logits."""
    os.environ["RESIDENT_LLM_CACHE"] = str(cache)
    making = repack(awq, cache)
    while True:
        try:
            next(making)
        except StopIteration as end:
            target = end.value
            break
    yield {"kind": "equality", "what": "weights", "ok": not list(find_differences(awq, target))}
    prompts = prompts or [draw_ids(32 + 7 * seed, vocab, 100 + seed) for seed in range(20)]
    with opened(half, context_len=8192) as engine:
        reference = output_ids(engine, prompts, 256)
        logits = torch.stack([logits_after(engine, ids) for ids in prompts])
    with opened(awq, context_len=8192) as engine:
        row = compared(engine, prompts, reference, output_ids(engine, prompts, 256))
        mine = torch.stack([logits_after(engine, ids) for ids in prompts])
    yield {"kind": "equality", "what": "greedy text", "model": awq.name, **row,
           "relative_error_of_logits": float((mine - logits).norm() / logits.norm()),
           "top1_agreement": float((mine.argmax(1) == logits.argmax(1)).float().mean())}  # fmt: skip


def kv_precision(model: Path, vocab: int, ids: Sequence[int] | None = None) -> Iterator[Row]:
    """4096 tokens fed in chunks of 32: top-1 agreement and mean KL against the fp16 cache."""
    fed = torch.tensor([list(ids or draw_ids(4096, vocab))])
    reference = None
    for kv_cache in ("fp16", "q8", "q6", "q4"):
        with opened(model, context_len=4352, kv_cache=kv_cache) as engine:
            parts, rows = engine._parts, []
            parts.cache.current_seq_len = 0
            with torch.inference_mode():
                for at in range(0, fed.shape[1], 32):
                    out = parts.model.forward(fed[:, at : at + 32], parts.cache)
                    rows.append(out[0, :, :vocab].float().log_softmax(-1).half().cpu())
            scores = torch.cat(rows)
            kv_bytes = engine.bytes.kv_cache
        if reference is None:
            reference = scores
        agreement = float((scores.argmax(1) == reference.argmax(1)).float().mean())
        kl = float((reference.float().exp() * (reference.float() - scores.float())).sum(1).mean())
        yield {"kind": "kv-precision", "model": model.name, "kv_cache": kv_cache, "top1_agreement": agreement,
               "mean_kl": kl, "kv_bytes": kv_bytes, "ok": agreement > AGREEMENT[kv_cache]}  # fmt: skip
