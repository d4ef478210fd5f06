"""A model folder with random weights of any size, made where it is needed: Qwen2's architecture, a tokenizer of bytes.

One character of ASCII is one token, so prompts of an exact length are easy to write.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

EOS = "<|end|>"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Geometry of the model; the defaults are 7.6 B parameters, 15.2 GB in bf16."""

    hidden: int = 3584
    num_layers: int = 28
    num_heads: int = 28
    num_kv_heads: int = 4
    ffn: int = 18944
    vocab: int = 152064
    context_len: int = 40960

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context_len,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eos_token_id": 256,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every weight, in file order."""
        head = self.hidden // self.num_heads
        q, kv = self.num_heads * head, self.num_kv_heads * head
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}"
            found |= {
                f"{at}.input_layernorm.weight": (self.hidden,),
                f"{at}.self_attn.q_proj.weight": (q, self.hidden),
                f"{at}.self_attn.q_proj.bias": (q,),
                f"{at}.self_attn.k_proj.weight": (kv, self.hidden),
                f"{at}.self_attn.k_proj.bias": (kv,),
                f"{at}.self_attn.v_proj.weight": (kv, self.hidden),
                f"{at}.self_attn.v_proj.bias": (kv,),
                f"{at}.self_attn.o_proj.weight": (self.hidden, q),
                f"{at}.post_attention_layernorm.weight": (self.hidden,),
                f"{at}.mlp.gate_proj.weight": (self.ffn, self.hidden),
                f"{at}.mlp.up_proj.weight": (self.ffn, self.hidden),
                f"{at}.mlp.down_proj.weight": (self.hidden, self.ffn),
            }
        return found | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocab, self.hidden)}


TINY = Shape(hidden=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn=128, vocab=320, context_len=4096)


def write(folder: Path, shape: Shape, device: str, shard_bytes: int = 2 << 30) -> int:
    """Write the folder, weights drawn on `device`; return the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    _write_tokenizer(folder, shape.vocab)
    generator = torch.Generator(device).manual_seed(0)
    where: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = held = 0

    def flush() -> None:
        name = f"model-{len(set(where.values())):05d}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, size in shape.tensors().items():
        if name.endswith("norm.weight"):
            tensor = torch.ones(size, dtype=torch.bfloat16)
        else:
            tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
            tensor = tensor.normal_(0, 0.02, generator=generator).cpu()
        shard[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
        if held >= shard_bytes:
            flush()
            held = 0
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_tokenizer(folder: Path, vocab: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: number for number, letter in enumerate(letters)}
    ids |= {f"~{number}": number for number in range(len(letters) + 1, vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
