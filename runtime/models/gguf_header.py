"""The header of a GGUF file: its metadata and its tensors, without reading any weights.

Format: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ModelLoadFailed, ModelUnsupported
from .safetensors_header import TensorHeader

BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""ggml type id -> (name, elements of a block, bytes of a block)."""

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


def read_gguf(file: str | Path, whole: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
    """(metadata, tensors by name). An array longer than 64 is given as its length, unless its name is in `whole`.

    Raises ModelLoadFailed for a file that is cut or no GGUF, ModelUnsupported for one part of several.
    """
    file = Path(file)
    try:
        size = os.path.getsize(file)
        with open(file, "rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelLoadFailed(f"{file.name} is no GGUF file. Download it again.")
            version, num_tensors, num_pairs = _unpack(stream, "<IQQ")
            if version not in (2, 3):
                raise ModelUnsupported(f"{file.name} has GGUF version {version}; 2 and 3 can be read.")
            metadata = {
                (name := _string(stream)): _value(stream, *_unpack(stream, "<I"), is_whole=name in whole)
                for _ in range(num_pairs)
            }
            entries = [_entry(stream) for _ in range(num_tensors)]
            header_end = stream.tell()
        if (parts := metadata.get("split.count", 1)) > 1:
            raise ModelUnsupported(f"{file.name} is one of {parts} parts. Join them with `llama-gguf-split --merge`.")
        align = int(metadata.get("general.alignment", 32))
        begin = -(-header_end // align) * align
        tensors = {name: _place(file, entry, begin) for name, *entry in entries}
    except OSError as error:
        raise ModelLoadFailed(f"{file.name} cannot be read: {error.strerror}. Download it again.") from error
    except (struct.error, ValueError, KeyError, TypeError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ModelLoadFailed(f"{file.name} is cut off or damaged in its header. Download it again.") from error
    end = max((header.end for header in tensors.values()), default=0)
    if end > size:
        raise ModelLoadFailed(f"{file.name} is cut off: {size} bytes of {end}. Download it again.")
    return metadata, tensors


def _unpack(stream: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))


def _string(stream: BinaryIO) -> str:
    (length,) = _unpack(stream, "<Q")
    return stream.read(length).decode("utf-8", errors="replace")


def _value(stream: BinaryIO, kind: int, *, is_whole: bool = False) -> Any:
    if kind == STRING:
        return _string(stream)
    if kind != ARRAY:
        return _unpack(stream, SCALARS[kind])[0]
    item, count = _unpack(stream, "<IQ")
    if count <= 64 or is_whole:
        return [_value(stream, item) for _ in range(count)]
    if item in SCALARS:
        stream.seek(count * struct.calcsize(SCALARS[item]), os.SEEK_CUR)
    else:
        for _ in range(count):
            _skip_value(stream, item)
    return count


def _skip_value(stream: BinaryIO, kind: int) -> None:
    if kind == STRING:
        stream.seek(_unpack(stream, "<Q")[0], os.SEEK_CUR)
    else:
        _value(stream, kind)


def _entry(stream: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    name = _string(stream)
    (num_dims,) = _unpack(stream, "<I")
    shape = tuple(reversed(_unpack(stream, f"<{num_dims}Q")))
    kind, offset = _unpack(stream, "<IQ")
    return name, shape, kind, offset


def _place(file: Path, entry: list[Any], begin: int) -> TensorHeader:
    shape, kind, offset = entry
    if kind not in BLOCKS:
        raise ModelUnsupported(f"{file.name} holds tensors of ggml type {kind}, which cannot be read here.")
    name, block, nbytes = BLOCKS[kind]
    start = begin + offset
    end = start + math.prod(shape) // block * nbytes
    return TensorHeader(dtype=name, shape=shape, file=str(file), start=start, end=end)
