"""Tiny models with random weights and a tokenizer of their own, made at test time in under a second."""

from __future__ import annotations

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")

COMMON = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 258,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
HYBRID = {
    **COMMON,
    **LINEAR,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
KINDS: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", COMMON),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", COMMON),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**COMMON, "head_dim": 8}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**COMMON, "sliding_window": 24}),
    "untied": ("LlamaConfig", "LlamaForCausalLM", {**COMMON, "tie_word_embeddings": False}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", HYBRID),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**COMMON, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


def can_make(kind: str) -> bool:
    """Whether the installed transformers knows this kind."""
    import transformers

    return hasattr(transformers, KINDS[kind][1])


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of the 256 bytes and five control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL[:3]])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in CONTROL[3:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_model(folder: Path, kind: str = "llama", *, seed: int = 0, shard_bytes: int | None = None) -> Path:
    """A folder with a model of this kind; its weights are spread enough that greedy answers vary."""
    import torch
    import transformers

    config_class, model_class, options = KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.25)
    model.save_pretrained(folder, **({"max_shard_size": shard_bytes} if shard_bytes else {}))
    make_tokenizer(folder)
    return folder
