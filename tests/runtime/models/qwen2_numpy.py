"""A reference forward pass of Llama and Qwen2 with plain matrix products, for weights of any source."""

import numpy as np


def _norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _rotate(x, theta):
    """x: [heads, tokens, head_dim], halves rotated as in Llama and Qwen2."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def logits(config, weights, ids, theta):
    """[tokens, vocab] float64 logits. weights: name -> [out, in] arrays."""
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    eps = config["rms_norm_eps"]

    def linear(x, name):
        out = x @ weights[f"{name}.weight"].astype(np.float64).T
        return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out

    x = weights["model.embed_tokens.weight"].astype(np.float64)[ids]
    mask = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        y = _norm(x, weights[f"{base}.input_layernorm.weight"], eps)
        q, k, v = (
            linear(y, f"{base}.self_attn.{part}_proj").reshape(len(ids), -1, dim).transpose(1, 0, 2) for part in "qkv"
        )
        k, v = (np.repeat(one, heads // kv_heads, axis=0) for one in (_rotate(k, theta), v))
        scores = _rotate(q, theta) @ k.transpose(0, 2, 1) / np.sqrt(dim) + mask
        share = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (share / share.sum(axis=-1, keepdims=True)) @ v
        x = x + linear(mixed.transpose(1, 0, 2).reshape(len(ids), -1), f"{base}.self_attn.o_proj")
        y = _norm(x, weights[f"{base}.post_attention_layernorm.weight"], eps)
        gate = linear(y, f"{base}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{base}.mlp.up_proj"), f"{base}.mlp.down_proj")
    return _norm(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].astype(np.float64).T
