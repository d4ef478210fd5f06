"""Models of random weights for the GPU run: a small one as 16 bit and as AWQ, and the 26.9 B one as AWQ."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import torch

from runtime.models.awq_layout import AWQ_ORDER, Codes, pack_columns

LINEARS = {
    "self_attn.q_proj": ("hidden", "heads"),
    "self_attn.k_proj": ("hidden", "kv"),
    "self_attn.v_proj": ("hidden", "kv"),
    "self_attn.o_proj": ("heads", "hidden"),
    "mlp.gate_proj": ("hidden", "ffn"),
    "mlp.up_proj": ("hidden", "ffn"),
    "mlp.down_proj": ("ffn", "hidden"),
}
SMALL = {"layers": 8, "hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 1536, "vocab": 49152}
"""Layers of SmolLM2-135M's shape."""
BIG = {"layers": 52, "hidden": 5120, "heads": 40, "kv_heads": 8, "head_dim": 128, "ffn": 27648, "vocab": 152064}
"""The synthetic 26.9 B decoder that was measured before this project existed."""


def config(shape: dict[str, int], context_len: int, *, is_tied: bool) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["ffn"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "vocab_size": shape["vocab"],
        "max_position_embeddings": context_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": is_tied,
        "torch_dtype": "float16",
        "dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_act": "silu",
    }


def sizes(shape: dict[str, int], name: str) -> tuple[int, int]:
    """(in, out) of a linear layer."""
    widths = {
        "hidden": shape["hidden"],
        "ffn": shape["ffn"],
        "heads": shape["heads"] * shape["head_dim"],
        "kv": shape["kv_heads"] * shape["head_dim"],
    }
    first, second = LINEARS[name]
    return widths[first], widths[second]


class Writer:
    """One safetensors file, written tensor by tensor; the header's place is kept until all sizes are known."""

    HEADER = 1 << 20

    def __init__(self, path: Path) -> None:
        self._out = path.open("wb")
        self._out.write(b" " * (8 + self.HEADER))
        self._entries: dict[str, object] = {}
        self._at = 0

    def add(self, name: str, dtype: str, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array)
        self._out.write(data.data)
        self._entries[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [self._at, self._at + data.nbytes],
        }
        self._at += data.nbytes

    def close(self) -> None:
        text = json.dumps(self._entries).encode()
        assert len(text) <= self.HEADER
        self._out.seek(0)
        self._out.write(self.HEADER.to_bytes(8, "little") + text.ljust(self.HEADER))
        self._out.close()


def begin(folder: Path, tokenizer: Path, settings: dict[str, object], quantization: dict[str, object] | None) -> Writer:
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copyfile(file, folder / file.name)
    extra = {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps({**settings, **extra}))
    return Writer(folder / "model.safetensors")


def awq_settings(group: int) -> dict[str, object]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def small_pair(root: Path, tokenizer: Path, group: int = 64) -> tuple[Path, Path]:
    """(AWQ folder, 16-bit folder of exactly its dequantised weights); zero points of 0 and 15 are among them."""
    random = np.random.default_rng(0)
    shape, names = SMALL, (root / "small-awq", root / "small-fp16")
    settings = config(shape, 8192, is_tied=False)
    awq = begin(names[0], tokenizer, settings, awq_settings(group))
    half = begin(names[1], tokenizer, settings, None)

    def both(name: str, array: np.ndarray) -> None:
        for writer in (awq, half):
            writer.add(name, "F16", array.astype(np.float16))

    both("model.embed_tokens.weight", random.normal(0, 1, (shape["vocab"], shape["hidden"])))
    for layer in range(shape["layers"]):
        base = f"model.layers.{layer}"
        for name in LINEARS:
            num_in, num_out = sizes(shape, name)
            codes = Codes(
                codes=random.integers(0, 16, (num_in, num_out), dtype=np.uint8),
                zeros=random.choice([0, 6, 7, 8, 9, 15], (num_in // group, num_out)).astype(np.uint8),
                scales=random.uniform(0.7, 1.3, (num_in // group, num_out)).astype(np.float16)
                * np.float16(0.15 / math.sqrt(num_in)),
            )
            half.add(f"{base}.{name}.weight", "F16", codes.dequantise().T)
            awq.add(f"{base}.{name}.qweight", "I32", pack_columns(codes.codes, AWQ_ORDER))
            awq.add(f"{base}.{name}.qzeros", "I32", pack_columns(codes.zeros, AWQ_ORDER))
            awq.add(f"{base}.{name}.scales", "F16", codes.scales)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            both(f"{base}.{norm}.weight", np.ones(shape["hidden"]))
    both("model.norm.weight", np.ones(shape["hidden"]))
    both("lm_head.weight", random.normal(0, 3 / math.sqrt(shape["hidden"]), (shape["vocab"], shape["hidden"])))
    awq.close()
    half.close()
    return names


def big_awq(root: Path, tokenizer: Path, group: int = 128) -> Path:
    """The 26.9 B model as AutoAWQ gemm; random codes and zero points, drawn on the GPU."""
    shape, folder = BIG, root / "big-awq"
    writer = begin(folder, tokenizer, config(shape, 36864, is_tied=False), awq_settings(group))

    def words(rows: int, columns: int) -> np.ndarray:
        return torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32, device="cuda").cpu().numpy()

    def normal(rows: int, columns: int, spread: float) -> np.ndarray:
        return torch.empty(rows, columns, dtype=torch.float16, device="cuda").normal_(0, spread).cpu().numpy()

    writer.add("model.embed_tokens.weight", "F16", normal(shape["vocab"], shape["hidden"], 1.0))
    ones = np.ones(shape["hidden"], np.float16)
    for layer in range(shape["layers"]):
        base = f"model.layers.{layer}"
        for name in LINEARS:
            num_in, num_out = sizes(shape, name)
            scale = torch.rand(num_in // group, num_out, device="cuda") * 0.05 / math.sqrt(num_in)
            writer.add(f"{base}.{name}.qweight", "I32", words(num_in, num_out // 8))
            writer.add(f"{base}.{name}.qzeros", "I32", words(num_in // group, num_out // 8))
            writer.add(f"{base}.{name}.scales", "F16", scale.half().cpu().numpy())
        writer.add(f"{base}.input_layernorm.weight", "F16", ones)
        writer.add(f"{base}.post_attention_layernorm.weight", "F16", ones)
    writer.add("model.norm.weight", "F16", ones)
    writer.add("lm_head.weight", "F16", normal(shape["vocab"], shape["hidden"], 1 / math.sqrt(shape["hidden"])))
    writer.close()
    return folder
