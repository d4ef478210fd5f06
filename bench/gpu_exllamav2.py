"""ExLlamaV2 on a real GPU, unattended: contract, proofs and speed, as one JSON table that grows row by row.

    python bench/gpu_exllamav2.py --tokenizer FOLDER --out FOLDER [--budget 540] [--stages contract,big]

FOLDER of --tokenizer holds a tokenizer.json. Models are made here, of random weights; the stage smollm takes real ones
from the two parts that exl2_smollm.py makes. A stage that fails is a row
with its error; the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

Row = dict[str, Any]
log = logging.getLogger("gpu_exllamav2")


class Table:
    """Rows with the second they came at, written again with every row."""

    def __init__(self, path: Path) -> None:
        self._path, self._began, self.rows = path, time.monotonic(), []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def add(self, row: Row) -> None:
        row = {"at_s": round(self.seconds, 1), **row}
        self.rows.append(row)
        log.info("%s", json.dumps(row))
        self._path.write_text(json.dumps(self.rows, indent=1))


def work_folder() -> Path:
    """A new folder where 40 GB fit, in memory if possible."""
    places = [Path("/dev/shm"), Path(tempfile.gettempdir()), Path.cwd()]
    fitting = [place for place in places if place.is_dir() and shutil.disk_usage(place).free > 40e9]
    place = fitting[0] if fitting else max(places[1:], key=lambda one: shutil.disk_usage(one).free)
    return Path(tempfile.mkdtemp(prefix="exl2-", dir=place))


def stages(
    args: argparse.Namespace, folder: Path, has_time: Callable[[float], bool]
) -> dict[str, Callable[[], Iterator[Row]]]:
    import exl2_checks as checks
    import exl2_models as models
    import exl2_speed as speed
    from exl2_smollm import unpack

    from runtime.models.repack import repack

    tokenizer, vocab = Path(args.tokenizer), models.SMALL["vocab"]
    made: dict[str, Any] = {}

    def small() -> tuple[Path, Path]:
        if "small" not in made:
            made["small"] = models.small_pair(folder, tokenizer)
        return made["small"]

    def contract() -> Iterator[Row]:
        for attention in ("flash_attention_2", "sdpa", "eager"):
            yield from checks.contract(small()[0], vocab, attention)
        yield from checks.contract(small()[1], vocab, "flash_attention_2")
        yield from checks.drafting(small()[0], vocab)
        yield from checks.lora(small()[1], vocab, folder)

    def big() -> Iterator[Row]:
        if not has_time(180):
            yield {"kind": "skipped", "what": "the 26.9 B model: no time left", "ok": True}
            return
        lengths = tuple(map(int, args.prompts.split(",")))
        began = time.monotonic()
        source = (
            folder / "big-awq" if args.folder and (folder / "big-awq").exists() else models.big_awq(folder, tokenizer)
        )
        yield {"kind": "make", "s": time.monotonic() - began, "ok": True}
        began = time.monotonic()
        for _ in repack(source):
            pass
        yield {"kind": "repack", "s": time.monotonic() - began, "ok": True}
        yield from speed.decode(source, args.kv_caches.split(","), lengths, has_time)

    def smollm() -> Iterator[Row]:
        awq, half = unpack([Path(part) for part in args.smollm], folder, tokenizer)
        yield from checks.equality(awq, half, vocab, folder / "cache", checks.text_prompts(awq))
        yield from checks.kv_precision(half, vocab, checks.text_ids(awq, 4096))
        yield from checks.contract(awq, vocab, "flash_attention_2")
        yield from checks.drafting(awq, vocab)

    return {
        "smollm": smollm,
        "causality": lambda: checks.causality(small()[1], vocab),
        "contract": contract,
        "equality": lambda: checks.equality(*small(), vocab, folder / "cache"),
        "big": big,
        "transformers": lambda: speed.transformers_bf16((512, 8192), has_time),
        "kv": lambda: checks.kv_precision(small()[1], vocab),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--budget", type=float, default=540, help="seconds for all stages")
    parser.add_argument("--stages", default="causality,contract,equality,big,transformers,kv")
    parser.add_argument("--kv-caches", default="fp16,q4,q8", help="of the stage big")
    parser.add_argument("--prompts", default="512,2048,8192,32768", help="lengths of the stage big, in tokens")
    parser.add_argument("--smollm", nargs=2, metavar="PART", help="both parts of SmolLM2, for the stage smollm")
    parser.add_argument("--name", default="exllamav2.json")
    parser.add_argument("--folder", help="keep the models that are made in this folder")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    table = Table(Path(args.out) / args.name)
    folder = Path(args.folder) if args.folder else work_folder()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["RESIDENT_LLM_CACHE"] = str(folder / "cache")

    def has_time(seconds: float) -> bool:
        return args.budget - table.seconds > seconds

    try:
        import torch
        import transformers

        table.add({"kind": "start", "torch": torch.__version__, "transformers": transformers.__version__,
                   "folder": str(folder), "free": shutil.disk_usage(folder).free, "ok": True})  # fmt: skip
        known = stages(args, folder, has_time)
        for name in args.stages.split(","):
            if not has_time(20):
                table.add({"kind": "skipped", "what": f"stage {name}: no time left", "ok": True})
                continue
            try:
                for row in known[name]():
                    table.add({"stage": name, **row})
            except Exception as error:
                table.add({"stage": name, "kind": "error", "error": f"{type(error).__name__}: {error}",
                           "trace": traceback.format_exc().splitlines()[-12:], "ok": False})  # fmt: skip
            gc.collect()
            torch.cuda.empty_cache()
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    failed = [row for row in table.rows if not row["ok"]]
    log.info("%d rows, %d not ok, %.0f s", len(table.rows), len(failed), table.seconds)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
