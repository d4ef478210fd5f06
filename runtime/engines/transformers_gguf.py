"""A GGUF file's weights, dequantised into a transformers model."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import transformers

from ..errors import EngineUnavailable, ModelLoadFailed
from ..events import LoadProgress
from ..shell import for_shell
from .transformers_attention import choose_attention
from .transformers_load import build, check_found, first_line, move, no_progress_bar, text_class, translate_errors
from .transformers_plan import Plan, check_gguf_fits

log = logging.getLogger(__name__)


def load_gguf(plan: Plan, attention: str) -> Generator[LoadProgress, None, tuple[Any, tuple[str, ...]]]:
    """Yield progress, return (model on its device in eval mode, warnings)."""
    if lacking := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise EngineUnavailable(f"A GGUF file needs {' and '.join(lacking)}. Try: {for_shell('pip install', *lacking)}")
    check_gguf_fits(plan)
    path = Path(plan.model.path)
    yield LoadProgress(done=0, total=plan.model.weights_bytes)
    try:
        with no_progress_bar():
            config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        model_class, config = text_class(config, plan.name)
        attention, warning = choose_attention(attention, model_class, plan.device, plan.dtype)
        names = _names(plan, model_class, config)
        if names is None:
            model = _load_whole(plan, model_class, attention)
        else:
            tensors = yield from _dequantise(plan, *names)
            with translate_errors("building the model"):
                model = build(model_class, config, tensors, plan.dtype, attention)
            del tensors
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        raise ModelLoadFailed(f"{plan.name} could not be loaded: {first_line(error)}") from error
    yield LoadProgress(done=plan.model.weights_bytes, total=plan.model.weights_bytes)
    yield from move(model, plan.device)
    return model.eval(), (warning,) if warning else ()


def _names(plan: Plan, model_class: Any, config: Any) -> tuple[Any, dict[str, str], dict[str, Any]] | None:
    """(processor, parameter by tensor name, the file's settings) by transformers' own tables.

    None where this version's tables do not cover the model: it then has another way to load it.
    """
    try:
        from transformers import modeling_gguf_pytorch_utils as tables

        settings = tables.load_gguf_checkpoint(plan.model.path, return_tensors=False)
        processor_class = tables.TENSOR_PROCESSORS.get(plan.model.architecture, tables.TensorProcessor)
        processor = processor_class(config=settings.get("config", {}))
        with torch.device("meta"):
            hollow = model_class(config)
        takes_processor = "processor" in inspect.signature(tables.get_gguf_hf_weights_map).parameters
        names = tables.get_gguf_hf_weights_map(hollow, *((processor,) if takes_processor else ()))
    except (ImportError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
        log.info("no table of tensor names for %s: %s", plan.name, error)
        return None
    wanted = {name for name, _ in hollow.named_parameters()}
    if not wanted <= set(names.values()):
        return None
    settings["tensors"] = {}
    return processor, names, settings


def _dequantise(
    plan: Plan, processor: Any, names: dict[str, str], settings: dict[str, Any]
) -> Generator[LoadProgress, None, dict[str, torch.Tensor]]:
    """Yield progress in bytes of the file at each tensor, return the weights by parameter name."""
    import gguf
    import numpy

    total, done = plan.model.weights_bytes, 0
    for tensor in gguf.GGUFReader(plan.model.path).tensors:
        with translate_errors(f"dequantising {tensor.name}"), torch.inference_mode(False):
            weights = gguf.dequantize(tensor.data, tensor.tensor_type)
            result = processor.process(
                weights=weights, name=tensor.name, tensor_key_mapping=names, parsed_parameters=settings
            )
            if result.name in names:
                whole = torch.from_numpy(numpy.array(result.weights))
                settings["tensors"][names[result.name]] = whole.to(plan.dtype)
        done += plan.model.tensors[tensor.name].nbytes
        yield LoadProgress(done=done, total=total)
    weights_by_name: dict[str, torch.Tensor] = settings.pop("tensors")
    return weights_by_name


def _load_whole(plan: Plan, model_class: Any, attention: str) -> Any:
    """By transformers' own loader, all at once."""
    path = Path(plan.model.path)
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with no_progress_bar(), torch.inference_mode(False), translate_errors("loading the weights"):
        model, found = model_class.from_pretrained(
            path.parent, dtype=plan.dtype, attn_implementation=attention, output_loading_info=True, **options
        )
    check_found(found, len(list(model.parameters())))
    return model
