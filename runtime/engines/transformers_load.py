"""From a folder to a transformers model: class and shape first, then the weights, tensor by tensor."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from ..errors import ModelLoadFailed, ModelUnsupported, OutOfMemory, ResidentError
from ..events import LoadProgress
from ..models.info import ModelInfo, text_config
from ..models.quantised import other_ways, why_not_in_transformers
from ..models.safetensors_header import TensorHeader
from .transformers_attention import choose_attention
from .transformers_plan import Plan

log = logging.getLogger(__name__)

IS_V5 = int(transformers.__version__.split(".")[0]) >= 5

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

EXPERT = re.compile(r"\.experts\.\d+\.")
LANGUAGE_PART = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)")
HEAD_PART = re.compile(r"^(?:model\.)?language_model\.(?=lm_head)")

Progress = Generator[LoadProgress, None, Any]


@contextlib.contextmanager
def translate_errors(doing: str, fault: type[ResidentError] = ModelLoadFailed) -> Iterator[None]:
    """Turn what torch and transformers raise into our errors, chained; our own bugs pass."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"The device's memory ran out while {doing}. Choose a smaller model or context, or free memory first."
        ) from error
    except RuntimeError as error:
        if "not enough memory" in str(error) or "can't allocate memory" in str(error):
            raise OutOfMemory(
                f"This machine's memory ran out while {doing}. Choose a smaller model or context."
            ) from error
        raise fault(f"Torch failed while {doing}: {first_line(error)}") from error


def read_tensor(header: TensorHeader) -> torch.Tensor:
    """The stored tensor in memory of its own; the file may change or go afterwards."""
    if header.dtype not in DTYPES:
        raise ModelUnsupported(f"Weights of type {header.dtype} cannot be read here. Get the model as bf16.")
    raw = torch.empty(header.nbytes, dtype=torch.uint8)
    with open(header.file, "rb", buffering=0) as stream:
        stream.seek(header.start)
        view, done = memoryview(raw.numpy().data), 0
        while done < header.nbytes:
            count = stream.readinto(view[done:])
            if not count:
                raise ModelLoadFailed(f"{Path(header.file).name} became shorter while it was read. Download it again.")
            done += count
    return raw.view(DTYPES[header.dtype]).reshape(header.shape)


def load_config(info: ModelInfo) -> Any:
    """The model's config for its text class."""
    known = transformers.CONFIG_MAPPING
    if info.model_type not in known:
        why = "needs code of its own, which is never run" if info.config.get("auto_map") else "is unknown"
        raise ModelUnsupported(
            f"{Path(info.path).name} is of the type {info.model_type!r}, which {why} to transformers "
            f"{transformers.__version__}. Update transformers, or choose another model."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(info.path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, TypeError, AttributeError, KeyError) as error:
        raise ModelLoadFailed(f"config.json of {Path(info.path).name} is not usable: {first_line(error)}") from error
    if not IS_V5:
        _restore_rope(config, info.config)
    return config


def _restore_rope(config: Any, written: Mapping[str, Any]) -> None:
    """Transformers 4 does not read `rope_parameters`, and would rotate by its default base without a word."""
    text = text_config(written)
    rope = text.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_theta" in text:
        return
    target = config.get_text_config()
    target.rope_theta = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        target.partial_rotary_factor = rope["partial_rotary_factor"]
    if rope.get("rope_type", "default") != "default":
        target.rope_scaling = {key: value for key, value in rope.items() if key != "rope_theta"}


def text_class(config: Any, name: str) -> tuple[Any, Any]:
    """(model class, its config): the causal language model of a config, also inside a multimodal one."""
    mapping = transformers.AutoModelForCausalLM._model_mapping
    inner = config.get_text_config()
    for one in (inner, config):
        if type(one) in mapping:
            found = mapping[type(one)]
            return (found[0] if isinstance(found, (tuple, list)) else found), one
    raise ModelUnsupported(
        f"{name} is of the type {config.model_type!r}, which transformers {transformers.__version__} has no text "
        "generation for. Choose a language model."
    )


def build(model_class: Any, config: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype, attention: str) -> Any:
    """The model made of `tensors` by transformers' own rules; raises ModelLoadFailed for what lacks or does not fit."""
    with no_progress_bar(), torch.inference_mode(False), torch.no_grad():
        model, found = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
        )
    check_found(_with_shapes(found, tensors, model), len(list(model.parameters())))
    return model


def _with_shapes(found: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], model: Any) -> dict[str, Any]:
    """The loading info with (name, stored shape, wanted shape) of what does not fit; transformers 4.57 gives names."""
    wanted = {name: tuple(one.shape) for name, one in model.named_parameters()}
    shaped = [
        (one, tuple(tensors[one].shape), wanted[one])
        if isinstance(one, str) and one in tensors and one in wanted
        else one
        for one in found["mismatched_keys"]
    ]
    return {**found, "mismatched_keys": shaped}


def check_found(found: Mapping[str, Any], num_parameters: int) -> None:
    if missing := sorted(found["missing_keys"]):
        raise ModelLoadFailed(
            f"{len(missing)} of {num_parameters} weights are missing from the model's files, the first is "
            f"{missing[0]}. Download the model again."
        )
    if wrong := sorted(found["mismatched_keys"], key=str):
        name, stored, wanted = (
            (*wrong[0], "?", "?")[:3] if isinstance(wrong[0], (tuple, list)) else (wrong[0], "?", "?")
        )
        raise ModelLoadFailed(
            f"The config and the weights do not belong together: {name} is {list(stored)}, and the config asks for "
            f"{list(wanted)}. Download config.json again."
        )
    if errors := found.get("error_msgs"):
        raise ModelLoadFailed(f"The weights could not be loaded: {first_line(errors[0])}")
    if unexpected := found["unexpected_keys"]:
        log.info("%d tensors are not used, for example %s", len(unexpected), min(unexpected))


def text_names(info: ModelInfo, config: Any) -> dict[str, TensorHeader]:
    """The stored tensors under the names that a text class knows, if they come from a multimodal model."""
    if text_config(info.config) is info.config or config.model_type == info.model_type:
        return dict(info.tensors)
    return {
        HEAD_PART.sub("", LANGUAGE_PART.sub("model.", name)): header
        for name, header in info.tensors.items()
        if ".visual." not in f".{name}" and "vision" not in name
    }


def stream_weights(
    model_class: Any,
    config: Any,
    headers: Mapping[str, TensorHeader],
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
) -> Progress:
    """Yield progress, return the model with all its weights on `device`.

    The model is first built of stand-ins that take no memory. Where each stand-in lies in it tells which tensor
    of the files belongs there, after transformers' renaming and tying; then each is read, converted, put in its
    place. Where transformers merges or reorders tensors, they are all read first and given to it.
    """
    with torch.inference_mode(False):
        stand_ins = {name: _stand_in(header, dtype) for name, header in headers.items()}
    is_merged = any(EXPERT.search(name) for name in headers)
    if not is_merged:
        model = build(model_class, config, dict(stand_ins), dtype, attention)
        places = _places(model, stand_ins)
        if places is not None:
            del stand_ins
            yield from _fill(places, headers, device)
            _move_buffers(model, device)
            return model
        del model
    del stand_ins
    return (yield from _read_all(model_class, config, headers, device, dtype, attention))


@torch.inference_mode(False)  # a host may load inside its own inference mode, whose tensors make no parameters
def _stand_in(header: TensorHeader, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the right type and shape that takes no memory: of one column, or - where transformers 4 would copy
    that - of pages that nobody touches."""
    stored = DTYPES.get(header.dtype, dtype)
    kind = dtype if stored.is_floating_point else stored
    if not IS_V5 or not header.shape or 0 in header.shape:
        return torch.empty(header.shape, dtype=kind)
    return torch.empty(header.shape[0], dtype=kind).as_strided(header.shape, (1,) + (0,) * (len(header.shape) - 1))


def _places(model: Any, stand_ins: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]] | None:
    """Which parameters and buffers each stored tensor fills; None if one is not filled by exactly one of them."""
    owners = {stand_in.untyped_storage().data_ptr(): name for name, stand_in in stand_ins.items() if stand_in.numel()}
    places: dict[str, list[torch.Tensor]] = {}
    kept = {name for name, _ in model.named_buffers()} - set(stand_ins)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        owner = owners.get(tensor.untyped_storage().data_ptr())
        if owner is None and name in kept:
            continue
        if owner is None and name in stand_ins and stand_ins[name].dtype != tensor.dtype:
            owner = name
        elif owner is None or stand_ins[owner].stride() != tensor.stride():
            log.info("%s does not come from one stored tensor", name)
            return None
        if stand_ins[owner].shape != tensor.shape:
            return None
        places.setdefault(owner, []).append(tensor)
    return places


def _fill(
    places: Mapping[str, list[torch.Tensor]], headers: Mapping[str, TensorHeader], device: torch.device
) -> Progress:
    total, done = sum(headers[name].nbytes for name in places), 0
    yield LoadProgress(done=0, total=total)
    for name, targets in sorted(places.items(), key=lambda place: (headers[place[0]].file, headers[place[0]].start)):
        with translate_errors(f"loading {name}"), torch.inference_mode(False), torch.no_grad():
            stored = read_tensor(headers[name])
            for target in targets:
                target.data = stored.to(device, target.dtype)
        done += headers[name].nbytes
        yield LoadProgress(done=done, total=total)


def _read_all(
    model_class: Any,
    config: Any,
    headers: Mapping[str, TensorHeader],
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
) -> Progress:
    total, done = sum(header.nbytes for header in headers.values()), 0
    tensors: dict[str, torch.Tensor] = {}
    for name, header in headers.items():
        with translate_errors(f"loading {name}"), torch.inference_mode(False):
            tensors[name] = read_tensor(header)
        done += header.nbytes
        yield LoadProgress(done=done, total=total)
    with translate_errors("building the model"):
        model = build(model_class, config, tensors, dtype, attention)
    del tensors
    yield from move(model, device)
    return model


def move(model: Any, device: torch.device) -> Progress:
    """Bring all of a model to `device`, one parameter after another."""
    parameters = [one for one in model.parameters() if one.device != device]
    total, done = sum(one.numel() * one.element_size() for one in parameters), 0
    for parameter in parameters:
        with translate_errors("moving the weights to the device"), torch.inference_mode(False), torch.no_grad():
            parameter.data = parameter.data.to(device)
        done += parameter.numel() * parameter.element_size()
        yield LoadProgress(done=done, total=total, what="weights to the device")
    _move_buffers(model, device)


def _move_buffers(model: Any, device: torch.device) -> None:
    with torch.inference_mode(False):
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != device:
                    module._buffers[name] = buffer.to(device)


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Transformers' own bar would write into the host's log; it is as it was afterwards."""
    from transformers.utils import logging as hf_logging

    was_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            hf_logging.enable_progress_bar()


def first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load_folder(plan: Plan, attention: str) -> Generator[LoadProgress, None, tuple[Any, tuple[str, ...]]]:
    """Yield progress, return (model on its device in eval mode, warnings)."""
    info = plan.model
    if info.quant_method is not None:
        return (yield from _load_quantised(plan, attention))
    model_class, config = text_class(load_config(info), plan.name)
    attention, warning = choose_attention(attention, model_class, plan.device, plan.dtype)
    headers = text_names(info, config)
    model = yield from stream_weights(model_class, config, headers, plan.device, plan.dtype, attention)
    return model.eval(), (warning,) if warning else ()


def _load_quantised(plan: Plan, attention: str) -> Generator[LoadProgress, None, tuple[Any, tuple[str, ...]]]:
    """By transformers' own loader, whose quantisers need the whole folder; it cannot be interrupted in between."""
    info = plan.model
    if reason := why_not_in_transformers(info):
        raise ModelUnsupported(f"{plan.name}: {reason}.")
    model_class, _ = text_class(load_config(info), plan.name)
    attention, warning = choose_attention(attention, model_class, plan.device, plan.dtype)
    yield LoadProgress(done=0, total=info.weights_bytes)
    with no_progress_bar(), torch.inference_mode(False), translate_errors("loading the weights"):
        try:
            model, found = model_class.from_pretrained(
                info.path,
                dtype=plan.dtype,
                device_map={"": plan.device},
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        except ImportError as error:
            raise ModelUnsupported(f"{plan.name} is quantised by {info.quant_method}: {first_line(error)}") from error
        except (ValueError, OSError) as error:
            raise ModelLoadFailed(f"{plan.name} could not be loaded: {first_line(error)}") from error
    if wrong := sorted(one if isinstance(one, str) else one[0] for one in found["mismatched_keys"]):
        raise ModelUnsupported(
            f"{plan.name}: transformers {transformers.__version__} lays out {info.quant_method} weights in another way "
            f"than this model does ({len(wrong)} tensors, the first is {wrong[0]}). Instead {other_ways(info)}."
        )
    check_found(found, len(list(model.parameters())))
    yield LoadProgress(done=info.weights_bytes, total=info.weights_bytes)
    return model.eval(), (warning,) if warning else ()
