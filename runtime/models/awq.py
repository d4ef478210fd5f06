"""What a 4-bit folder really holds: one word (genuine, damaged, not_awq) and the facts behind it. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import ModelLoadFailed
from .awq_layout import Half, half_from_raw
from .info import read_config
from .safetensors_header import TensorHeader, read_headers

Verdict = Literal["genuine", "damaged", "not_awq"]
Form = Literal["autoawq gemm", "compressed-tensors pack-quantized"]
JsonMap = Mapping[str, object]

NUMPY_DTYPES = {"I32": np.int32, "I64": np.int64, "F16": np.uint16, "BF16": np.uint16, "F32": np.float32}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the config says that the folder was quantised.

    group:     inputs that share a scale; None is one group for all of them
    skipped:   names or parts of names that stayed in 16 bit
    """

    form: Form
    group: int | None
    is_symmetric: bool
    skipped: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors that every 4-bit module must have."""
        if self.form == "autoawq gemm":
            return ("qweight", "qzeros", "scales")
        zero_point = () if self.is_symmetric else ("weight_zero_point",)
        return ("weight_packed", "weight_scale", *zero_point)


@dataclass(frozen=True, kw_only=True)
class AwqReport:
    """What the inspection found. `faults` are reasons to refuse; `notes` explain what looks odd but is normal."""

    verdict: Verdict
    reason: str
    scheme: Scheme | None = None
    modules: tuple[str, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """JSON values; the verdict stands under `awq`."""
        scheme = self.scheme
        return {
            "awq": self.verdict,
            "reason": self.reason,
            "form": scheme.form if scheme else None,
            "bits": 4 if scheme else None,
            "group_size": scheme.group if scheme else None,
            "is_symmetric": scheme.is_symmetric if scheme else None,
            "num_4bit_modules": len(self.modules),
            "modules_4bit": list(self.modules),
            "modules_16bit": [{"name": name, "why": why} for name, why in self.kept],
            "faults": list(self.faults),
            "notes": list(self.notes),
        }


class NotAwq(Exception):
    """The folder is something else; the message says what."""


class BadLayout(Exception):
    """The folder calls itself AWQ but lies in a way that cannot be read; the message says how."""


def _map(value: object) -> JsonMap:
    return value if isinstance(value, Mapping) else {}


def _names(value: object) -> tuple[str, ...]:
    return tuple(str(name) for name in value) if isinstance(value, (list, tuple)) else ()


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_scheme(config: JsonMap) -> Scheme:
    """The quantisation that the config declares; raises NotAwq, or BadLayout for AWQ that we cannot express."""
    quant = _map(config.get("quantization_config"))
    method = str(quant.get("quant_method", ""))
    if not quant:
        raise NotAwq("its config names no quantisation")
    if method == "awq":
        return _read_autoawq(quant)
    if method == "compressed-tensors":
        return _read_compressed_tensors(quant)
    raise NotAwq(f"its config says {method or 'nothing known'}")


def _read_autoawq(quant: JsonMap) -> Scheme:
    bits = quant.get("bits", quant.get("w_bit"))
    layout = str(quant.get("version", quant.get("format", "gemm"))).lower()
    if layout != "gemm":
        raise BadLayout(f'it has the "{layout}" layout; only "gemm" can be repacked. Look for a gemm version')
    if bits != 4:
        raise BadLayout(f"it has {bits} bits; only 4 can be repacked")
    if quant.get("desc_act"):
        raise BadLayout("it was quantised in activation order, which this layout cannot express")
    group = _int(quant.get("group_size", quant.get("q_group_size", 128)))
    return Scheme(
        form="autoawq gemm",
        group=None if group == -1 else group,
        is_symmetric=not quant.get("zero_point", True),
        skipped=_names(quant.get("modules_to_not_convert")),
    )


def _read_compressed_tensors(quant: JsonMap) -> Scheme:
    layout = str(quant.get("format", ""))
    groups = _map(quant.get("config_groups"))
    if layout != "pack-quantized":
        raise NotAwq(f'its compressed-tensors format is "{layout}", not pack-quantized')
    if len(groups) != 1:
        raise BadLayout(f"it mixes {len(groups)} quantisation schemes; only one can be repacked")
    [group] = groups.values()
    weights = _map(_map(group).get("weights"))
    if _map(group).get("input_activations"):
        raise NotAwq("its activations are quantised too")
    if weights.get("num_bits") != 4 or weights.get("type", "int") != "int":
        raise NotAwq(f"its weights are {weights.get('type', 'int')} of {weights.get('num_bits')} bits, not int of 4")
    if weights.get("actorder") in ("group", "dynamic", True):
        raise BadLayout("it was quantised in activation order, which this layout cannot express")
    strategy = str(weights.get("strategy", "group"))
    if strategy not in ("group", "channel"):
        raise BadLayout(f'its strategy is "{strategy}"; only group and channel can be repacked')
    return Scheme(
        form="compressed-tensors pack-quantized",
        group=_int(weights.get("group_size")) if strategy == "group" else None,
        is_symmetric=bool(weights.get("symmetric", True)),
        skipped=_names(quant.get("ignore")),
    )


def read_bytes(header: TensorHeader) -> memoryview:
    """A tensor's bytes as a view into its file's memory map."""
    if header.start == header.end:
        return memoryview(b"")
    return np.memmap(header.file, np.uint8, "r", header.start, (header.end - header.start,)).data


def read_tensor(header: TensorHeader) -> npt.NDArray[Any]:
    """A tensor as a view into its file's memory map; F16 and BF16 come as raw uint16."""
    return np.frombuffer(read_bytes(header), NUMPY_DTYPES[header.dtype]).reshape(header.shape)


def read_half(header: TensorHeader) -> tuple[Half, int]:
    """A tensor as fp16, and how many of its values changed by becoming fp16."""
    return half_from_raw(read_tensor(header), header.dtype)


def inspect_awq(path: str | Path) -> AwqReport:
    """Look at a folder; raises ModelNotFound where there is no model at all."""
    folder = Path(path)
    config = read_config(folder)
    try:
        scheme = read_scheme(config)
    except NotAwq as why:
        return AwqReport(verdict="not_awq", reason=f"This is no AWQ model: {why}.")
    except BadLayout as why:
        return AwqReport(
            verdict="damaged", reason=f"This AWQ model cannot be used as it is: {why}.", faults=(str(why),)
        )
    try:
        headers = read_headers(folder)
    except ModelLoadFailed as error:
        return AwqReport(verdict="damaged", reason=str(error), scheme=scheme, faults=(str(error),))
    return _judge(folder, config, scheme, headers)


def _judge(folder: Path, config: JsonMap, scheme: Scheme, headers: Mapping[str, TensorHeader]) -> AwqReport:
    first = scheme.parts[0]
    modules = tuple(sorted(name[: -len(first) - 1] for name in headers if name.endswith("." + first)))
    faults: list[str] = []
    notes: list[str] = []
    if not modules:
        faults.append(f"its config says {scheme.form}, but no tensor is called *.{first}")
    num_zero_points = 0
    for module in modules:
        layer_faults, num_zeros = _check_module(module, scheme, headers)
        faults += layer_faults
        num_zero_points += num_zeros
    if num_zero_points:
        notes.append(f"{num_zero_points} zero points are 0; the repack stores them as mirror images, without loss.")
    faults += _check_tokenizer(folder, config, headers)
    kept = tuple(_kept(headers, scheme))
    if faults:
        more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
        reason = f"This AWQ model is damaged: {faults[0]}{more}. Download it again, or choose another."
        return AwqReport(
            verdict="damaged", reason=reason, scheme=scheme, modules=modules, kept=kept, faults=tuple(faults)
        )
    group = scheme.group or "all inputs"
    reason = f"{scheme.form}: {len(modules)} modules in 4 bit (group {group}), {len(kept)} in 16 bit."
    return AwqReport(verdict="genuine", reason=reason, scheme=scheme, modules=modules, kept=kept, notes=tuple(notes))


def module_shape(module: str, scheme: Scheme, headers: Mapping[str, TensorHeader]) -> tuple[int, int]:
    """(in, out) of a 4-bit module, from its packed weight."""
    rows, columns = headers[f"{module}.{scheme.parts[0]}"].shape
    return (rows, columns * 8) if scheme.form == "autoawq gemm" else (columns * 8, rows)


def _expected(scheme: Scheme, num_in: int, num_out: int) -> dict[str, tuple[int, ...]]:
    groups = num_in // (scheme.group or num_in)
    if scheme.form == "autoawq gemm":
        return {
            "qweight": (num_in, num_out // 8),
            "qzeros": (groups, num_out // 8),
            "scales": (groups, num_out),
            "bias": (num_out,),
        }
    return {
        "weight_packed": (num_out, num_in // 8),
        "weight_scale": (num_out, groups),
        "weight_zero_point": (num_out // 8, groups),
        "bias": (num_out,),
    }


def _check_module(module: str, scheme: Scheme, headers: Mapping[str, TensorHeader]) -> tuple[list[str], int]:
    """The faults of one module, and how many of its zero points are 0."""
    missing = [part for part in scheme.parts if f"{module}.{part}" not in headers]
    if missing:
        return [f"{module} has no {', '.join(missing)}"], 0
    if len(headers[f"{module}.{scheme.parts[0]}"].shape) != 2:
        return [f"{module}.{scheme.parts[0]} is not a matrix"], 0
    num_in, num_out = module_shape(module, scheme, headers)
    faults = [f"{module}: {fault}" for fault in shape_faults(num_in, num_out, scheme.group)]
    for part, shape in _expected(scheme, num_in, num_out).items():
        header = headers.get(f"{module}.{part}")
        if header is not None and header.shape != shape:
            faults.append(f"{module}.{part} has the shape {list(header.shape)}, not {list(shape)}")
    faults += _check_g_idx(module, scheme, headers, num_in)
    if faults:
        return faults, 0
    scale_name = "scales" if scheme.form == "autoawq gemm" else "weight_scale"
    for name in (f"{module}.{scale_name}", f"{module}.bias"):
        if name in headers and (num_bad := int((~np.isfinite(read_half(headers[name])[0])).sum())):
            faults.append(f"{name} has {num_bad} values that are not finite in fp16")
    if scheme.form == "autoawq gemm" or not scheme.is_symmetric:
        words = read_tensor(headers[f"{module}.{scheme.parts[2]}"]).view(np.uint32)
        return faults, sum(int(((words >> np.uint32(4 * i)) & np.uint32(15) == 0).sum()) for i in range(8))
    return faults, 0


def shape_faults(num_in: int, num_out: int, group: int | None) -> list[str]:
    """Why ExLlamaV2's 4-bit kernels could not take this layer; empty if they can."""
    faults = []
    if group is not None and (group < 32 or group & (group - 1)):
        faults.append(f"group {group} is no power of two from 32 up")
    elif group is not None and num_in % group:
        faults.append(f"{num_in} inputs are not a multiple of the group {group}")
    if num_in % 32:
        faults.append(f"{num_in} inputs are not a multiple of 32")
    if num_out % 32:
        faults.append(f"{num_out} outputs are not a multiple of 32")
    return faults


def _check_g_idx(module: str, scheme: Scheme, headers: Mapping[str, TensorHeader], num_in: int) -> list[str]:
    header = headers.get(f"{module}.weight_g_idx") or headers.get(f"{module}.g_idx")
    if header is None or scheme.group is None:
        return []
    if header.shape != (num_in,) or not np.array_equal(read_tensor(header), np.arange(num_in) // scheme.group):
        return [f"{module} has its inputs in activation order, which the repack cannot express"]
    return []


def _check_tokenizer(folder: Path, config: JsonMap, headers: Mapping[str, TensorHeader]) -> list[str]:
    """Whether the output head has a row for every token."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return []
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return [f"{path.name} is not valid JSON"]
    vocab = _map(_map(tokenizer).get("model")).get("vocab")
    ids = [int(i) for i in vocab.values()] if isinstance(vocab, dict) else []
    ids += [int(token["id"]) for token in tokenizer.get("added_tokens", ())]
    head = headers.get("lm_head.weight") or headers.get("model.embed_tokens.weight")
    if ids and head is not None and head.shape[0] <= max(ids):
        return [f"the output head has {head.shape[0]} rows, but the tokenizer has ids up to {max(ids)}"]
    return []


def _kept(headers: Mapping[str, TensorHeader], scheme: Scheme) -> list[tuple[str, str]]:
    """The matrices that stayed in 16 bit, each with the reason."""
    kept = []
    for name, header in headers.items():
        module = name.removesuffix(".weight")
        if module == name or len(header.shape) != 2:
            continue
        if "embed" in module:
            why = "a lookup table, read one row at a time: 4 bit would save no bandwidth"
        elif module.endswith("lm_head"):
            why = "the output head is kept exact: its errors go straight into the next token"
        elif any(part.removeprefix("re:").strip(".*$^") in module for part in scheme.skipped):
            why = "named in the config as not quantised"
        else:
            why = "stored in 16 bit; the config does not say why"
        kept.append((module, why))
    return kept
