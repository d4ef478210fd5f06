"""Does a resident model step aside for a diffusion model, and how fast does it come back? On a real GPU.

    python -m bench.gpu_residency --comfy .build/carry --out DIR [--budget-s 480] [--tiny]

ComfyUI's real `load_models_gpu` (see tools/carry_comfy.py), a synthetic model of 15.2 GB, and a torch module that
needs its room. A card with more memory than that is filled with ballast first. Writes DIR/residency.json; --tiny
runs the same steps with a tiny model on the CPU, where nothing can be learned but that the script is whole.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.synthetic_llm import TINY, Shape, write

ROOT = Path(__file__).resolve().parents[1]
GB = 1_000_000_000
TOLERANCE_BYTES = 300_000_000
PREFIXES = (2048, 8192, 32768)


class TorchModel:
    """A torch module in ComfyUI's ledger, as a diffusion model would be: all on the card, or not there."""

    parent = None
    offload_device = torch.device("cpu")

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.load_device = device
        self.size = num_bytes
        self.model = torch.nn.Module()

    def model_size(self) -> int:
        return self.size

    def loaded_size(self) -> int:
        return sum(buffer.nbytes for buffer in self.model.buffers())

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.loaded_size() else self.offload_device

    def model_dtype(self) -> None:
        return None

    def model_patches_to(self, device: object) -> None:
        pass

    def model_patches_models(self) -> list[Any]:
        return []

    def lowvram_patch_counter(self) -> int:
        return 0

    def is_clone(self, other: object) -> bool:
        return other is self

    def partially_load(self, device: object, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        before = self.loaded_size()
        for at in range(8 if not before else 0):
            self.model.register_buffer(
                f"w{at}", torch.zeros(self.size // 8, dtype=torch.uint8, device=self.load_device)
            )
        return self.loaded_size() - before

    def partially_unload(self, device: object, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        return 0

    def detach(self, unpatch_all: bool = True) -> None:
        if unpatch_all:
            for name in list(self.model._buffers):
                delattr(self.model, name)


def pack_module(name: str) -> Any:
    """A module of the pack under the name that ComfyUI would give it, without its node classes."""
    if "resident_llm" not in sys.modules:
        for package, folder in (("resident_llm", ROOT), ("resident_llm.nodes", ROOT / "nodes")):
            module = types.ModuleType(package)
            module.__path__ = [str(folder)]
            sys.modules[package] = module
    return importlib.import_module(f"resident_llm.{name}")


class Bench:
    """The ledger, the runtime under it, and what was measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.began = time.perf_counter()
        self.args = args
        self.device = torch.device("cpu") if args.tiny else torch.device("cuda", torch.cuda.current_device())
        sys.path.insert(0, args.comfy)
        importlib.import_module("comfy.cli_args").args.cpu = args.tiny
        self.host = importlib.import_module("comfy.model_management")
        self.pack = pack_module("runtime")
        self.events = pack_module("runtime.events")
        self.runtime = pack_module("nodes.residency").enter(self.pack.Runtime())
        self.results: dict[str, Any] = {"is_tiny": args.tiny}
        self.texts: set[str] = set()  # of one prompt, cold and warm: in 16 bits they may differ
        self.diffusion = TorchModel(1000 if args.tiny else int(args.diffusion_gb * GB), self.device)

    def left_s(self) -> float:
        return float(self.args.budget_s - (time.perf_counter() - self.began))

    def record(self, name: str, value: Any) -> None:
        """Keep a result, at once in the file too: a run that is cut off leaves what it has."""
        self.results[name] = value
        print(f"[{time.perf_counter() - self.began:6.1f} s] {name}: {json.dumps(value)}", flush=True)
        (Path(self.args.out) / "residency.json").write_text(json.dumps(self.results, indent=1) + "\n")

    def free(self, *, is_as_it_is: bool = False) -> int:
        """Free bytes by the device's own count, after all cached memory went back unless it is to be left as it is."""
        if self.device.type == "cpu":
            return 0
        torch.cuda.synchronize()
        if not is_as_it_is:
            gc.collect()
            torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def spec(self, **fields: Any) -> Any:
        context_len = 4096 if self.args.tiny else 36864
        fields = {"device": str(self.device), "context_len": context_len, **fields}
        return self.pack.ModelSpec(model=self.args.model, engine="transformers", **fields)

    def generate(self, text: str, max_tokens: int) -> tuple[str, Any, float]:
        """(raw text, Finished, seconds until the model was on the device)."""
        request = self.pack.Request(
            prompt=self.pack.Prompt.of(text), sampling=self.pack.Sampling(temperature=0.0), max_tokens=max_tokens
        )
        began = time.perf_counter()
        loaded_s, text, end = 0.0, "", None
        for event in self.runtime.generate(self.spec(), [request]):
            if isinstance(event, self.events.Started):
                loaded_s = time.perf_counter() - began
            elif isinstance(event, self.events.TextDelta):
                text += event.text
            elif isinstance(event, self.events.Failed):
                raise event.error
            elif isinstance(event, self.events.Finished):
                end = event
        return text, end, loaded_s

    def need_room(self) -> float:
        """Seconds for ComfyUI to load the diffusion model, our eviction included."""
        began = time.perf_counter()
        if self.device.type == "cpu":
            self.host.free_memory(1e30, self.device)
        else:
            self.host.load_models_gpu([self.diffusion])
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def held(self) -> int:
        return int(sum(one.bytes.device for one in self.runtime.residents()))


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def rss_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def describe(bench: Bench) -> None:
    import transformers

    card = "cpu" if bench.device.type == "cpu" else torch.cuda.get_device_name(bench.device)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    bench.record("machine", {"device": card, **versions, "commit": commit(), "date": time.strftime("%Y-%m-%d")})


def bandwidth(bench: Bench) -> None:
    """Bytes per second between host and device, best of five copies of 1 GiB, pinned and pageable."""
    if bench.device.type == "cpu":
        return
    size = 1 << 30
    on_device = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    found = {}
    for kind in ("pinned", "pageable"):
        on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        for name, target, source in (("to_device", on_device, on_host), ("to_host", on_host, on_device)):
            times = []
            for _ in range(5):
                torch.cuda.synchronize()
                times.append(seconds(lambda t=target, s=source: (t.copy_(s), torch.cuda.synchronize())))  # type: ignore[misc]
            found[f"{kind}_{name}_gb_per_s"] = size / min(times) / GB
        del on_host
    torch.cuda.empty_cache()
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()
    bench.record("bus", found)


def first_load(bench: Bench) -> None:
    """Load through the ledger; bytes computed beside those measured by the device."""
    if bench.device.type == "cuda":
        warm = torch.ones(256, 256, dtype=torch.bfloat16, device=bench.device)
        (warm @ warm).sum().item()
        del warm
    bench.results["free_before"] = before = bench.free()
    text, end, loaded_s = bench.generate("hello " * 20, 32)
    [resident] = bench.runtime.residents()
    warm_text, _, _ = bench.generate("hello " * 20, 32)
    bench.texts = {text, warm_text}
    bench.record(
        "first_load",
        {
            "load_s": loaded_s,
            "bytes_computed": resident.computed.as_dict(),
            "bytes_counted": resident.bytes.as_dict(),
            "device_bytes": before - bench.free(),
            "attention": resident.info.attention,
            "tpot_s": end.timings.tpot_s,
        },
    )


def decoding_allocates_nothing(bench: Bench) -> None:
    """Allocator segments, retries and buffer addresses before and after 200 decode steps, the second time."""
    if bench.device.type == "cpu":
        return
    with bench.runtime.lease(bench.spec()) as engine:
        pass
    layers = [layer for layer in engine._live.cache.layers if getattr(layer, "is_initialized", False)]

    def state() -> dict[str, Any]:
        stats = torch.cuda.memory_stats(bench.device)
        names = ("segment.all.current", "num_alloc_retries", "num_ooms")
        return {name: stats[name] for name in names} | {"addresses": [layer.keys.data_ptr() for layer in layers]}

    bench.generate("warm up " * 10, 200)
    before = state()
    bench.generate("warm up " * 10, 200)
    after = state()
    bench.record(
        "decode_200",
        {
            "is_flat": before == after,
            "segments": [before["segment.all.current"], after["segment.all.current"]],
            "retries": [before["num_alloc_retries"], after["num_alloc_retries"]],
            "has_same_addresses": before["addresses"] == after["addresses"],
        },
    )


def ballast(bench: Bench) -> torch.Tensor | None:
    """Fill the card but for a little, so that the diffusion model needs the LLM's room and no other."""
    if bench.device.type == "cpu":
        return None
    size = bench.free() - int(bench.args.left_free_gb * GB)
    return torch.empty(max(0, size), dtype=torch.uint8, device=bench.device)


def evict_and_return(bench: Bench, name: str) -> None:
    """ComfyUI asks for the room, then the LLM is used again."""
    held = bench.held()
    free_before = bench.free()
    evict_s = bench.need_room()
    left = bench.held()
    copies = sum(one.bytes.host_copy for one in bench.runtime.residents())
    free_with_diffusion = bench.free(is_as_it_is=True)
    text, _, return_s = bench.generate("hello " * 20, 32)
    diffusion = bench.diffusion.size if bench.device.type == "cuda" else 0
    bench.record(
        name,
        {
            "held_bytes": held,
            "left_bytes": left,
            "host_copy_bytes": copies,
            "device_freed_bytes": free_with_diffusion + diffusion - free_before,
            "missing_bytes": held - left - (free_with_diffusion + diffusion - free_before),
            "evict_s": evict_s,
            "return_s": return_s,
            "return_gb_per_s": held / return_s / GB,
            "has_same_text": text in bench.texts,
            "diffusion_left_bytes": bench.diffusion.loaded_size(),
        },
    )


def return_from_disk(bench: Bench, name: str, *, drop_page_cache: bool) -> None:
    """Unload for good, then load again: from the page cache, or from the disk itself."""
    unload_s = seconds(bench.runtime.unload)
    if drop_page_cache:
        for path in Path(bench.args.model).glob("*.safetensors"):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    text, _, return_s = bench.generate("hello " * 20, 32)
    bench.record(
        name,
        {
            "unload_s": unload_s,
            "return_s": return_s,
            "return_gb_per_s": bench.held() / return_s / GB,
            "has_same_text": text in bench.texts,
        },
    )


def everything_gone(bench: Bench) -> None:
    """After unloading, the device has what it had before the first load."""
    bench.runtime.unload()
    bench.host.unload_all_models()
    missing = bench.results["free_before"] - bench.free(is_as_it_is=True)
    bench.record("after_unload", {"missing_bytes": missing, "is_within_300_mb": missing <= TOLERANCE_BYTES})


def cycles(bench: Bench, stop_at_s: float) -> None:
    """Evict and return again and again: device memory and the process stay as large as they were."""
    rows = []
    for number in range(bench.args.cycles):
        if bench.left_s() < stop_at_s:
            break
        evict_s = bench.need_room()
        _, _, return_s = bench.generate("hello " * 20, 4)
        rows.append((evict_s, return_s, bench.free(), rss_bytes()))
        if number % 10 == 0:
            print(f"cycle {number + 1}: {rows[-1]}", flush=True)
    if not rows:
        return
    free, rss = [row[2] for row in rows], [row[3] for row in rows]
    bench.record(
        "cycles",
        {
            "num_cycles": len(rows),
            "evict_s_median": statistics.median(row[0] for row in rows),
            "return_s_median": statistics.median(row[1] for row in rows),
            "free_bytes_first": free[0],
            "free_bytes_last": free[-1],
            "free_bytes_spread": max(free) - min(free),
            "rss_bytes_first": rss[0],
            "rss_bytes_last": rss[-1],
            "num_loads": bench.runtime.num_loads(),
        },
    )


def prefix_reuse(bench: Bench) -> None:
    """TTFT of a long prompt cold; of the same again; of the same beginning with other ends. Medians of three.

    The bound on the two warm ones is two decode steps + 20 ms.
    """
    rows = []
    for length in PREFIXES if not bench.args.tiny else (512,):
        if bench.left_s() < 20:
            break
        head = (f"{length} " + "lorem ipsum " * (length // 12))[: length - 60]
        ends = [bench.generate(f"{head} first question, please", 24)[1]]
        again = [bench.generate(f"{head} first question, please", 24)[1] for _ in range(3)]
        other = [bench.generate(f"{head} {word} question, then", 24)[1] for word in ("second", "third", "fourth")]
        step_s = statistics.median(end.timings.tpot_s for end in again + other)
        row: dict[str, Any] = {"num_prompt_tokens": ends[0].num_prompt_tokens, "decode_step_s": step_s}
        for name, found in (("cold", ends), ("same_again", again), ("other_end", other)):
            row[f"{name}_ttft_s"] = statistics.median(end.timings.ttft_s for end in found)
            row[f"{name}_num_cached_tokens"] = found[-1].num_cached_tokens
        row["warm_bound_s"] = bound_s = 2 * step_s + 0.020
        row["is_within_bound"] = max(row["same_again_ttft_s"], row["other_end_ttft_s"]) <= bound_s
        rows.append(row)
    bench.record("prefix_reuse", rows)


def run(bench: Bench) -> None:
    describe(bench)
    bandwidth(bench)
    if not (Path(bench.args.model) / "config.json").exists():
        shape = TINY if bench.args.tiny else Shape()
        began = time.perf_counter()
        total = write(Path(bench.args.model), shape, str(bench.device))
        bench.record("model", {"bytes": total, "write_s": time.perf_counter() - began})
    first_load(bench)
    decoding_allocates_nothing(bench)
    prefix_reuse(bench)
    weight = ballast(bench)
    evict_and_return(bench, "first_eviction")
    evict_and_return(bench, "second_eviction")
    return_from_disk(bench, "return_from_page_cache", drop_page_cache=False)
    return_from_disk(bench, "return_from_disk", drop_page_cache=True)
    cycles(bench, stop_at_s=25)
    del weight
    everything_gone(bench)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--comfy", required=True, help="folder that holds comfy/model_management.py")
    parser.add_argument("--out", required=True, help="folder for residency.json")
    parser.add_argument("--model", default=str(Path(tempfile.gettempdir()) / "synthetic-llm"), help="made if missing")
    parser.add_argument("--budget-s", type=float, default=480, help="seconds; later steps are shortened to keep it")
    parser.add_argument("--diffusion-gb", type=float, default=8, help="what ComfyUI loads beside the LLM")
    parser.add_argument("--left-free-gb", type=float, default=3, help="what the ballast leaves free beside the LLM")
    parser.add_argument("--cycles", type=int, default=50, help="times to evict and return")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to try the script itself")
    return parser.parse_args(argv)


def main() -> int:
    bench = Bench(parse())
    try:
        run(bench)
    except Exception:
        bench.record("failed", traceback.format_exc())
        return 1
    finally:
        bench.runtime.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
