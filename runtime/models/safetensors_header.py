"""Headers of safetensors files: what tensors a folder holds and where, without reading any of them.

Format: https://huggingface.co/docs/safetensors/index#format - 8 bytes of header length (little endian), the
header as JSON, then the bytes of the tensors, offsets counted from the header's end.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelLoadFailed

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000

BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
"""Bits of one element, by the format's name of its type."""


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """One stored tensor: bytes `start` to `end` of `file`, counted from the file's begin."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def read_headers(folder: str | Path) -> dict[str, TensorHeader]:
    """All tensors of a folder by name, of one file or of all shards that its index names.

    Raises ModelLoadFailed for a missing shard, a cut file, a broken header, or a tensor that the index promises
    and no shard holds.
    """
    folder = Path(folder)
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        return {name: header for file in files for name, header in read_header(file).items()}
    places = _weight_map(index)
    shards = sorted(set(places.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelLoadFailed(
            f"{len(missing)} of {len(shards)} weight files are missing in {folder.name}, the first is {missing[0]}. "
            "Download the model again."
        )
    tensors = {name: header for shard in shards for name, header in read_header(folder / shard).items()}
    lost = [name for name in places if name not in tensors]
    if lost:
        raise ModelLoadFailed(
            f"{len(lost)} of {len(places)} tensors that {INDEX} names are in no file of {folder.name}, the first is "
            f"{lost[0]}. Download the model again."
        )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadFailed(
            f"{index.name} of {index.parent.name} is no index of weights ({error}). Download it again."
        ) from error
    outside = [str(shard) for shard in places.values() if Path(str(shard)).name != shard]
    if outside:
        raise ModelLoadFailed(f"{index.name} of {index.parent.name} points outside its folder, to {outside[0]}.")
    return dict(places)


def read_header(file: str | Path) -> dict[str, TensorHeader]:
    """The tensors of one file by name, checked against the file's size."""
    file = Path(file)
    try:
        size, length, tensors = _read(file)
    except OSError as error:
        raise ModelLoadFailed(_broken(file, str(error.strerror))) from error
    end = max((header.end for header in tensors.values()), default=8 + length)
    if end > size:
        raise ModelLoadFailed(_broken(file, f"it is cut off: {size} bytes of {end}"))
    return tensors


def _read(file: Path) -> tuple[int, int, dict[str, TensorHeader]]:
    """(bytes of the file, bytes of its header, its tensors by name)."""
    size = os.path.getsize(file)
    with open(file, "rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelLoadFailed(_broken(file, f"its {size} bytes hold no header"))
        try:
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            tensors = {name: _tensor(file, entry, 8 + length) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ModelLoadFailed(_broken(file, f"its header is broken ({error})")) from error
    return size, length, tensors


def _tensor(file: Path, entry: dict[str, Any], offset: int) -> TensorHeader:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    start, end = (offset + int(at) for at in entry["data_offsets"])
    header = TensorHeader(dtype=dtype, shape=shape, file=str(file), start=start, end=end)
    if dtype not in BITS:
        raise ValueError(f"unknown type {dtype}")
    if header.nbytes * 8 != header.num_elements * BITS[dtype]:
        raise ValueError(f"{dtype}{list(shape)} is not {header.nbytes} bytes")
    return header


def _broken(file: Path, why: str) -> str:
    return f"{file.name} of {file.parent.name} cannot be read: {why}. Download the file again."
