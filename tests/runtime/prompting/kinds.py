"""Tokenizers of four kinds: two of real models, two made here."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. A photo of a cat, masterpiece, best quality!",
    "user system assistant <tag> </tag> [x] {y} think end start im INST s unk pad 0 1 2 3 4 5 6 7 8 9 | _ / < >",
    "Ein Bär läuft über die Straße. Les élèves étudient à l'école. \u4f60\u597d \u4e16\u754c",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KINDS = ("smollm2", "qwen3", "unigram", "sentencepiece")
CONTROL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "[INST]"]


def write_model(folder, tokenizer, **files):
    """A model folder with a tokenizer and JSON files, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def unigram():
    """Unigram with NFKC, whose own vocabulary holds control tokens too, as T5's does."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(CONTROL[:2])
    tokenizer.add_tokens([AddedToken(token, normalized=True) for token in CONTROL[2:]])
    return tokenizer


def sentencepiece():
    """BPE with byte fallback and a space before each text, as Llama 2 has it; one token swallows white space."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(CONTROL[:2])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in CONTROL[2:-1]])
    tokenizer.add_tokens([AddedToken(CONTROL[-1], rstrip=True, lstrip=True)])
    return tokenizer
