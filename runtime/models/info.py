"""What a model on disk is, from its headers and config alone: no torch, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ModelLoadFailed, ModelNotFound, ModelUnsupported
from .gguf_header import read_gguf
from .rope import context_len_of
from .safetensors_header import TensorHeader, read_headers

Format = Literal["safetensors", "gguf"]

RECURRENT = ("linear_attention", "conv", "mamba", "recurrent")
"""Layer types that keep a state of fixed size instead of keys and values."""
WITHOUT_CACHE = ("mlp", "moe")


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """What one token, and one sequence, leave in the cache; counted in elements.

    num_layers:  layers that keep keys and values
    key_dim, value_dim: per head
    state_elements: of the recurrent layers together, whatever the length
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    num_state_layers: int = 0
    state_elements: int = 0
    conv_elements: int = 0

    @property
    def elements_per_token(self) -> int:
        return self.num_layers * self.num_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A model folder or file.

    architecture: the config's class name, or GGUF's general.architecture
    dtype:        what the config says its weights are, "" if it does not
    quant_method: "awq", "gptq" ...; None for plain weights; for GGUF the commonest block type
    context_len:  most positions by the config; None if it names none
    config:       the whole config as written; GGUF's metadata for a GGUF
    """

    path: str
    format: Format
    architecture: str
    model_type: str
    dtype: str
    quant_method: str | None
    quant_config: Mapping[str, Any]
    context_len: int | None
    num_layers: int
    kv: KVGeometry
    vocab_size: int
    tensors: Mapping[str, TensorHeader] = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)

    @property
    def weights_bytes(self) -> int:
        """Bytes as stored."""
        return sum(header.nbytes for header in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        """Stored elements; packed weights count as packed."""
        return sum(header.num_elements for header in self.tensors.values())


def read_model(path: str) -> ModelInfo:
    """What stands at `path`; raises ModelNotFound, ModelLoadFailed or ModelUnsupported with a sentence."""
    place = Path(path).expanduser()
    place = place if place.name else place.absolute()  # "." has no name to tell
    if not path or not place.exists():
        raise ModelNotFound(
            f"There is no model at {path or repr(path)}. Pick one in the loader; in a shell, give the path of a model "
            "folder or of a .gguf file."
        )
    if not place.is_dir():
        if place.suffix.lower() != ".gguf" or not place.is_file():
            raise ModelUnsupported(f"{place.name} is no model: choose a .gguf file, or a folder with a config.json.")
        try:
            return _gguf_info(place)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ModelLoadFailed(f"{place.name} does not describe a language model ({error!r}).") from error
    config = read_config(place)
    tensors = read_headers(place)
    if not tensors:
        pickles = [*place.glob("*.bin"), *place.glob("*.pt"), *place.glob("*.pth")]
        if pickles:
            raise ModelUnsupported(
                f"{place.name} holds its weights as {pickles[0].name}, which may run code when opened. "
                "Get the model as safetensors."
            )
        raise ModelLoadFailed(f"{place.name} holds no weights (*.safetensors). Download the model again.")
    return _folder_info(place, config, tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as written."""
    file = folder / "config.json"
    if not file.is_file():
        names = sorted(one.name for one in folder.glob("*.gguf"))
        if names:
            raise ModelNotFound(f"{folder.name} has no config.json. Choose the file {names[0]} in it instead.")
        what = "is empty" if not any(folder.iterdir()) else "has no config.json"
        raise ModelNotFound(f"{folder.name} {what}, so it is no model. Download the model again, or pick another.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadFailed(
            f"config.json of {folder.name} cannot be read: {error.strerror}. Download it again."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadFailed(f"config.json of {folder.name} is no JSON ({error}). Download it again.") from error
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ModelLoadFailed(f"config.json of {folder.name} names no model_type. Download the file again.")
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(name), Mapping):
            return dict(config[name])
    return config


def _folder_info(place: Path, config: dict[str, Any], tensors: dict[str, TensorHeader]) -> ModelInfo:
    text = text_config(config)
    quant = config.get("quantization_config") or text.get("quantization_config") or {}
    try:
        return ModelInfo(
            path=str(place),
            format="safetensors",
            architecture=next(iter(config.get("architectures") or text.get("architectures") or ()), ""),
            model_type=str(config["model_type"]),
            dtype=str(
                text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""
            ),
            quant_method=quant.get("quant_method"),
            quant_config=quant,
            context_len=context_len_of(text),
            num_layers=num_layers_of(text),
            kv=kv_geometry(text),
            vocab_size=int(text.get("vocab_size") or config.get("vocab_size") or 0),
            tensors=tensors,
            config=config,
        )
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelLoadFailed(f"config.json of {place.name} does not describe a language model ({error!r}).") from error


def num_layers_of(config: Mapping[str, Any]) -> int:
    return int(next((config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config), 0))


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The type of each layer: the config's own list, or its interval of full attention, or all full."""
    if types := config.get("layer_types"):
        return list(types)
    num_layers = num_layers_of(config)
    if interval := config.get("full_attention_interval"):
        return ["full_attention" if (at + 1) % interval == 0 else "linear_attention" for at in range(num_layers)]
    return ["full_attention"] * num_layers


def kv_geometry(config: Mapping[str, Any]) -> KVGeometry:
    """The cache's geometry by the (text) config."""
    types = layer_types(config)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    width = int(config.get("hidden_size") or config.get("n_embd") or 0)
    head_dim = int(config.get("head_dim") or width // heads)
    nope, rope = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
    num_state_layers = sum(kind in RECURRENT for kind in types)
    key_heads, value_heads = config.get("linear_num_key_heads", 0), config.get("linear_num_value_heads", 0)
    key_dim, value_dim = config.get("linear_key_head_dim", 0), config.get("linear_value_head_dim", 0)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return KVGeometry(
        num_layers=sum(kind not in (*RECURRENT, *WITHOUT_CACHE) for kind in types)
        - int(config.get("num_kv_shared_layers") or 0),
        num_heads=int(config.get("num_key_value_heads") or heads),
        key_dim=nope + rope if nope and rope else head_dim,
        value_dim=int(config.get("v_head_dim") or head_dim),
        num_state_layers=num_state_layers,
        state_elements=num_state_layers * value_heads * key_dim * value_dim,
        conv_elements=num_state_layers * channels * config.get("linear_conv_kernel_dim", 0),
    )


def _gguf_info(file: Path) -> ModelInfo:
    metadata, tensors = read_gguf(file)
    name = str(metadata.get("general.architecture", ""))

    def number(key: str, default: int = 0) -> int:
        value = metadata.get(f"{name}.{key}", default)
        return int(max(value) if isinstance(value, list) else value)

    if not name or not tensors or not number("block_count"):
        raise ModelLoadFailed(f"{file.name} does not describe a language model. Choose another file.")
    heads = number("attention.head_count", 1)
    head_dim = number("embedding_length") // max(heads, 1)
    tokens = metadata.get("tokenizer.ggml.tokens", 0)
    kinds = [header.dtype for header in tensors.values() if len(header.shape) > 1]
    interval = number("full_attention_interval", 1)
    return ModelInfo(
        path=str(file),
        format="gguf",
        architecture=name,
        model_type=name,
        dtype="",
        quant_method=max(set(kinds), key=kinds.count).lower() if kinds else None,
        quant_config={},
        context_len=number("context_length") or None,
        num_layers=number("block_count"),
        kv=KVGeometry(
            num_layers=number("block_count") // max(interval, 1),
            num_heads=number("attention.head_count_kv", heads),
            key_dim=number("attention.key_length", head_dim),
            value_dim=number("attention.value_length", head_dim),
        ),
        vocab_size=len(tokens) if isinstance(tokens, list) else int(tokens),
        tensors=tensors,
        config=metadata,
    )
