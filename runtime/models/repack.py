"""AWQ to ExLlamaV2's 4-bit layout, once, into a cache folder; the user's model folder is only read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import ModelLoadFailed, ModelUnsupported
from ..events import LoadProgress
from ..telemetry import format_bytes
from .awq import (
    Scheme,
    inspect_awq,
    module_shape,
    read_bytes,
    read_half,
    read_tensor,
)
from .awq_layout import Codes, Packed, Words, pack_for_exllamav2, read_awq_gemm, read_pack_quantized
from .exllamav2_config import exllamav2_config
from .info import read_config
from .safetensors_header import TensorHeader, read_headers

log = logging.getLogger(__name__)

CONVERTER_VERSION = 1
"""Part of the cache key: raise it when the same source would give other bytes."""

WEIGHTS_FILE = "model.safetensors"
FACTS_FILE = "resident_repack.json"
NUM_WORKERS = 4
"""Layers that are unpacked and packed at once; numpy lets go of the interpreter lock."""


def cache_root() -> Path:
    """Where repacked models are kept: RESIDENT_LLM_CACHE, or the user's cache folder."""
    if named := os.environ.get("RESIDENT_LLM_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    return Path(base).expanduser() / "resident-llm"


def repack_key(folder: Path) -> str:
    """16 hex digits that change with the config, any file's size, time or header, and the converter."""
    digest = hashlib.sha256(f"converter {CONVERTER_VERSION}\n".encode())
    digest.update((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        stat = file.stat()
        digest.update(f"\n{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        with file.open("rb") as data:
            digest.update(data.read(int.from_bytes(data.read(8), "little")))
    return digest.hexdigest()[:16]


def repacked_folder(folder: str | Path, root: Path | None = None) -> Path:
    """Where the repack of this folder is, or would be."""
    folder = Path(folder)
    return (root or cache_root()) / "repacked" / f"{folder.resolve().name}-{repack_key(folder)}"


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """One tensor of the output, as its header says it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...]) -> _Planned:
        return cls(name=name, dtype=dtype, shape=shape, num_bytes={"I32": 4, "F16": 2}[dtype] * math.prod(shape))


def repack(path: str | Path, root: Path | None = None) -> Generator[LoadProgress, None, Path]:
    """Yield progress in bytes, return the folder that ExLlamaV2 can load; at once if it is there already.

    Raises ModelUnsupported for what is no AWQ, ModelLoadFailed for damage or a full disk. A crash or a closed
    generator leaves nothing half-written under the final name.
    """
    folder = Path(path)
    target = repacked_folder(folder, root)
    if (target / FACTS_FILE).is_file():
        return target
    report = inspect_awq(folder)
    if report.verdict == "not_awq" or report.scheme is None:
        raise ModelUnsupported(f"{report.reason} Only AWQ models are repacked.")
    if report.verdict == "damaged":
        raise ModelLoadFailed(report.reason)
    job = _Repack(folder, report.scheme, report.modules)
    _check_disk(target, job.num_bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield from job.write(partial)
        with contextlib.suppress(OSError):
            partial.chmod(0o755)
        try:
            partial.replace(target)
        except OSError:
            if not (target / FACTS_FILE).is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _check_disk(target: Path, num_bytes: int) -> None:
    there = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < num_bytes * 1.02:
        raise ModelLoadFailed(
            f"Repacking needs {format_bytes(num_bytes)} in {target.parent}, where {format_bytes(free)} are free. "
            "Free some, or point RESIDENT_LLM_CACHE to a folder on another disk."
        )


class _Repack:
    """What is written, in which order, from which tensors."""

    def __init__(self, folder: Path, scheme: Scheme, modules: tuple[str, ...]) -> None:
        self._folder = folder
        self._scheme = scheme
        self._modules = set(modules)
        self._headers = read_headers(folder)
        self._config = exllamav2_config(read_config(folder), scheme)
        self._layers = {name: self._plan_layer(name) for name in modules}
        self._copied = [name for name in self._headers if not self._belongs_to_layer(name)]
        self.num_mirrored = 0
        self.num_rounded = 0

    def _belongs_to_layer(self, name: str) -> bool:
        return name.rpartition(".")[0] in self._modules

    def _plan_layer(self, module: str) -> list[_Planned]:
        num_in, num_out = module_shape(module, self._scheme, self._headers)
        groups = num_in // (self._scheme.group or num_in)
        planned = [
            _Planned.of(f"{module}.qweight", "I32", (num_in // 8, num_out)),
            _Planned.of(f"{module}.qzeros", "I32", (groups, num_out // 8)),
            _Planned.of(f"{module}.scales", "F16", (groups, num_out)),
        ]
        if f"{module}.bias" in self._headers:
            planned.append(_Planned.of(f"{module}.bias", "F16", (num_out,)))
        return planned

    def _plan(self) -> list[_Planned]:
        copied = [
            _Planned(name=name, dtype=header.dtype, shape=header.shape, num_bytes=header.end - header.start)
            for name, header in ((name, self._headers[name]) for name in self._copied)
        ]
        return copied + [one for planned in self._layers.values() for one in planned]

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self._plan())

    def write(self, target: Path) -> Generator[LoadProgress, None, None]:
        total, done = self.num_bytes, 0
        with (target / WEIGHTS_FILE).open("wb") as out:
            _write_header(out, self._plan())
            for name in self._copied:
                header = self._headers[name]
                out.write(read_bytes(header))
                done += header.end - header.start
                yield LoadProgress(done=done, total=total, what="repacking AWQ")
            for tensors in _in_order(self._make_layer, list(self._layers)):
                for tensor in tensors:
                    out.write(tensor)
                    done += len(tensor)
                yield LoadProgress(done=done, total=total, what="repacking AWQ")
            out.flush()
            os.fsync(out.fileno())
        self._write_small_files(target)

    def _make_layer(self, module: str) -> list[bytes]:
        packed, num_rounded = pack_layer(module, self._scheme, self._headers)
        tensors = [packed.qweight.tobytes(), packed.qzeros.tobytes(), packed.scales.tobytes()]
        if (bias := self._headers.get(f"{module}.bias")) is not None:
            half, rounded = read_half(bias)
            num_rounded += rounded
            tensors.append(half.tobytes())
        self.num_mirrored += packed.num_mirrored
        self.num_rounded += num_rounded
        return tensors

    def _write_small_files(self, target: Path) -> None:
        for file in self._folder.iterdir():
            is_small = file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(".index.json")
            if file.is_file() and is_small:
                shutil.copyfile(file, target / file.name)
        (target / "config.json").write_text(json.dumps(self._config, indent=2), encoding="utf-8")
        facts = {
            "source": str(self._folder.resolve()),
            "converter_version": CONVERTER_VERSION,
            "form": self._scheme.form,
            "num_modules": len(self._layers),
            "num_mirrored_zero_points": self.num_mirrored,
            "num_values_rounded_to_fp16": self.num_rounded,
        }
        (target / FACTS_FILE).write_text(json.dumps(facts, indent=2), encoding="utf-8")
        log.info("repacked %s: %s", self._folder.name, facts)


def read_layer(module: str, scheme: Scheme, headers: Mapping[str, TensorHeader]) -> tuple[Codes, int]:
    """One 4-bit module of the source unpacked, and how many scales were rounded to fp16."""

    def words(part: str) -> Words:
        return read_tensor(headers[f"{module}.{part}"])

    if scheme.form == "autoawq gemm":
        scales, num_rounded = read_half(headers[f"{module}.scales"])
        return read_awq_gemm(words("qweight"), words("qzeros"), scales), num_rounded
    scales, num_rounded = read_half(headers[f"{module}.weight_scale"])
    zero_point = None if scheme.is_symmetric else words("weight_zero_point")
    return read_pack_quantized(words("weight_packed"), scales, zero_point), num_rounded


def pack_layer(module: str, scheme: Scheme, headers: Mapping[str, TensorHeader]) -> tuple[Packed, int]:
    """One 4-bit module in ExLlamaV2's layout, and how many scales were rounded to fp16."""
    codes, num_rounded = read_layer(module, scheme, headers)
    return pack_for_exllamav2(codes), num_rounded


def find_differences(path: str | Path, repacked: str | Path) -> Iterator[str]:
    """Yield a sentence for every tensor or 4-bit module that differs between source and repack; none is the proof."""
    folder, target = Path(path), Path(repacked)
    report = inspect_awq(folder)
    if report.verdict != "genuine" or report.scheme is None:
        yield report.reason
        return
    source, made = read_headers(folder), read_headers(target)
    modules = set(report.modules)
    for name, header in source.items():
        module, _, part = name.rpartition(".")
        if module in modules and part != "bias":
            continue
        if name not in made:
            yield f"{name} is not in the repack."
        elif module in modules:
            if not np.array_equal(read_half(header)[0], read_half(made[name])[0]):
                yield f"{name} differs."
        elif read_bytes(header) != read_bytes(made[name]):
            yield f"{name} differs."
    for module in report.modules:
        yield from _module_differences(module, report.scheme, source, made)


def _module_differences(
    module: str, scheme: Scheme, source: Mapping[str, TensorHeader], made: Mapping[str, TensorHeader]
) -> Iterator[str]:
    if missing := [part for part in ("qweight", "qzeros", "scales") if f"{module}.{part}" not in made]:
        yield f"{module} has no {', '.join(missing)} in the repack."
        return
    expected = read_layer(module, scheme, source)[0].dequantise()
    packed = Packed(
        qweight=read_tensor(made[f"{module}.qweight"]),
        qzeros=read_tensor(made[f"{module}.qzeros"]),
        scales=read_half(made[f"{module}.scales"])[0],
    )
    got = packed.unpack().dequantise()
    if not np.array_equal(expected, got):
        yield f"{module}: {int((expected != got).sum())} of {expected.size} weights differ."


def _write_header(out: BinaryIO, planned: list[_Planned]) -> None:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in planned:
        entries[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [at, at + one.num_bytes]}
        at += one.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)


def _in_order(make: Callable[[str], list[bytes]], names: list[str]) -> Iterator[list[bytes]]:
    """`make(name)` for every name, in order, a few at a time on threads."""
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        waiting: list[Future[list[bytes]]] = []
        try:
            for name in names:
                waiting.append(pool.submit(make, name))
                if len(waiting) > NUM_WORKERS:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()
