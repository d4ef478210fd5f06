"""Write 4-bit folders the way AutoAWQ and compressed-tensors do, from 16-bit or 32-bit weights; numpy only."""

import json
from pathlib import Path

import numpy as np

from runtime.models.awq_layout import AWQ_ORDER, Codes, pack_columns, pack_rows

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantise(weight, group, *, is_symmetric=False):
    """Codes of a float [out, in] weight, each group of inputs rounded on its own 16 steps."""
    columns = np.ascontiguousarray(weight.T.astype(np.float32)).reshape(-1, group, weight.shape[0])
    if is_symmetric:
        scales = np.maximum(np.abs(columns).max(axis=1) / 7.5, 1e-5)
        zeros = np.full(scales.shape, 8.0, np.float32)
    else:
        low, high = columns.min(axis=1), columns.max(axis=1)
        scales = np.maximum(high - low, 1e-5) / 15
        zeros = np.clip(-np.round(low / scales), 0, 15)
    scales = scales.astype(np.float16)
    steps = np.round(columns / scales.astype(np.float32)[:, None]) + zeros[:, None]
    codes = np.clip(steps, 0, 15).astype(np.uint8).reshape(-1, weight.shape[0])
    return Codes(codes=codes, zeros=zeros.astype(np.uint8), scales=scales)


def bf16(array):
    """The upper half of each float32, as raw uint16 (cut, not rounded)."""
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def autoawq_tensors(name, layer, dtype="F16"):
    scales = layer.scales if dtype == "F16" else bf16(layer.scales)
    return {
        f"{name}.qweight": ("I32", pack_columns(layer.codes, AWQ_ORDER)),
        f"{name}.qzeros": ("I32", pack_columns(layer.zeros, AWQ_ORDER)),
        f"{name}.scales": (dtype, scales),
    }


def pack_quantized_tensors(name, layer, *, is_symmetric=False, dtype="F16"):
    num_in, num_out = layer.codes.shape
    scales = layer.scales if dtype == "F16" else bf16(layer.scales)
    tensors = {
        f"{name}.weight_packed": ("I32", np.ascontiguousarray(pack_rows(layer.codes).T)),
        f"{name}.weight_scale": (dtype, np.ascontiguousarray(scales.T)),
        f"{name}.weight_shape": ("I64", np.array([num_out, num_in], np.int64)),
    }
    if not is_symmetric:
        tensors[f"{name}.weight_zero_point"] = ("I32", np.ascontiguousarray(pack_columns(layer.zeros).T))
    return tensors


def write_safetensors(path, tensors):
    """tensors: name -> (safetensors dtype, array)."""
    header, at, blobs = {}, 0, []
    for name, (dtype, array) in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}
        at += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def autoawq_config(group, **more):
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **more}


def pack_quantized_config(group, *, is_symmetric=False, **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": group,
                    "symmetric": is_symmetric,
                    **weights,
                },
            }
        },
    }


TINY_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 160,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
    "eos_token_id": [1, 2],
}


def tiny_qwen2_weights(seed=0):
    """Float32 weights of a two-layer Qwen2, by their names in a model folder."""
    random = np.random.default_rng(seed)
    size, ffn, kv, vocab = 128, 256, 64, 160
    shapes = {"q_proj": (size, size), "k_proj": (kv, size), "v_proj": (kv, size), "o_proj": (size, size)}
    ffn_shapes = {"gate_proj": (ffn, size), "up_proj": (ffn, size), "down_proj": (size, ffn)}
    weights = {"model.embed_tokens.weight": random.normal(0, 1, (vocab, size))}
    for layer in range(2):
        base = f"model.layers.{layer}"
        for name, shape in shapes.items():
            weights[f"{base}.self_attn.{name}.weight"] = random.normal(0, shape[1] ** -0.5, shape)
            if name != "o_proj":
                weights[f"{base}.self_attn.{name}.bias"] = random.normal(0, 0.1, shape[0])
        for name, shape in ffn_shapes.items():
            weights[f"{base}.mlp.{name}.weight"] = random.normal(0, shape[1] ** -0.5, shape)
        weights[f"{base}.input_layernorm.weight"] = np.ones(size)
        weights[f"{base}.post_attention_layernorm.weight"] = np.ones(size)
    weights["model.norm.weight"] = np.ones(size)
    weights["lm_head.weight"] = random.normal(0, size**-0.5, (vocab, size))
    return {name: array.astype(np.float32) for name, array in weights.items()}


def write_folder(folder, config, weights, *, form="autoawq", group=64, is_symmetric=False, dtype="F16", num_shards=1):
    """A whole 4-bit folder from float weights; every linear of the layers is quantised."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, array in weights.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rpartition(".")[2] in LINEARS:
            layer = quantise(array, group, is_symmetric=is_symmetric)
            if form == "autoawq":
                tensors |= autoawq_tensors(module, layer, dtype)
            else:
                tensors |= pack_quantized_tensors(module, layer, is_symmetric=is_symmetric, dtype=dtype)
        else:
            tensors[name] = (dtype, array.astype(np.float16) if dtype == "F16" else bf16(array))
    quantization = (
        autoawq_config(group) if form == "autoawq" else pack_quantized_config(group, is_symmetric=is_symmetric)
    )
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    names = list(tensors)
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard::num_shards]
        weight_map |= dict.fromkeys(mine, file)
        write_safetensors(folder / file, {name: tensors[name] for name in mine})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
