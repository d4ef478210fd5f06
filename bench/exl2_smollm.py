"""SmolLM2-135M in 4 bit, small enough to be carried to a machine without a network, in two parts.

python bench/exl2_smollm.py FOLDER PART1 PART2      # from the fp32 folder
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from runtime.models.awq_layout import AWQ_ORDER, Codes, pack_columns, unpack_columns
from runtime.models.safetensors_header import read_headers
from tests.runtime.models.awq_writer import LINEARS, quantise

GROUP = 64
SETTINGS = "settings"


def pack(folder: Path, parts: list[Path]) -> None:
    """Quantise every linear of the layers to 4 bit and the embedding to 8, and split the bytes."""
    arrays: dict[str, Any] = {SETTINGS: np.frombuffer((folder / "config.json").read_bytes(), np.uint8)}
    for name, header in read_headers(folder).items():
        weight = np.fromfile(header.file, np.float32, header.num_elements, offset=header.start).reshape(header.shape)
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LINEARS:
            layer = quantise(weight, GROUP)
            arrays[f"{module}:codes"] = pack_columns(layer.codes)
            arrays[f"{module}:zeros"] = pack_columns(layer.zeros)
            arrays[f"{module}:scales"] = layer.scales
        elif weight.ndim == 2:
            step = np.abs(weight).max(axis=1, keepdims=True) / 127
            arrays[f"{name}:bytes"] = np.round(weight / step).astype(np.int8)
            arrays[f"{name}:step"] = step.astype(np.float16)
        else:
            arrays[f"{name}:half"] = weight.astype(np.float16)
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    blob = out.getvalue()
    middle = len(blob) // 2
    for path, piece in zip(parts, (blob[:middle], blob[middle:]), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(piece)


def unpack(parts: list[Path], root: Path, tokenizer: Path) -> tuple[Path, Path]:
    """(AWQ folder, 16-bit folder of exactly its weights)."""
    from exl2_models import awq_settings, begin

    arrays = np.load(io.BytesIO(b"".join(part.read_bytes() for part in parts)))
    settings = json.loads(arrays[SETTINGS].tobytes())
    settings = {**settings, "dtype": "float16", "rope_theta": settings["rope_parameters"]["rope_theta"]}
    names = (root / "smollm-awq", root / "smollm-fp16")
    awq = begin(names[0], tokenizer, settings, awq_settings(GROUP))
    half = begin(names[1], tokenizer, settings, None)
    for key in arrays.files:
        name, _, kind = key.partition(":")
        if kind == "codes":
            codes = Codes(
                codes=unpack_columns(arrays[key]),
                zeros=unpack_columns(arrays[f"{name}:zeros"]),
                scales=arrays[f"{name}:scales"],
            )
            half.add(f"{name}.weight", "F16", codes.dequantise().T)
            awq.add(f"{name}.qweight", "I32", pack_columns(codes.codes, AWQ_ORDER))
            awq.add(f"{name}.qzeros", "I32", pack_columns(codes.zeros, AWQ_ORDER))
            awq.add(f"{name}.scales", "F16", codes.scales)
        elif kind in ("bytes", "half"):
            plain = arrays[key] if kind == "half" else arrays[key] * arrays[f"{name}:step"].astype(np.float32)
            for writer in (awq, half):
                writer.add(name, "F16", plain.astype(np.float16))
    awq.close()
    half.close()
    return names


if __name__ == "__main__":
    pack(Path(sys.argv[1]), [Path(sys.argv[2]), Path(sys.argv[3])])
