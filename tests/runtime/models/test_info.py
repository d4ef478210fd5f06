import json
import os
import struct

import pytest

from runtime.errors import ModelLoadFailed, ModelNotFound, ModelUnsupported
from runtime.models.footprint import kv_bytes, weights_bytes
from runtime.models.info import kv_geometry, layer_types, read_model
from runtime.models.rope import context_len_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "vocab_size": 10,
}


def write_safetensors(file, tensors):
    """`tensors`: name -> shape, all F32 zeros."""
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = 4
        for one in shape:
            size *= one
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / "model.safetensors", {"a": (4, 2), "b": (3,)})
    return tmp_path


def test_a_folder_tells_what_it_is_without_its_weights(folder):
    info = read_model(str(folder))

    assert (info.format, info.architecture, info.context_len, info.num_layers) == (
        "safetensors",
        "LlamaForCausalLM",
        64,
        3,
    )
    assert (info.weights_bytes, info.num_parameters) == (44, 11)
    assert info.tensors["a"].shape == (4, 2)


def test_shards_are_read_through_their_index(folder):
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "m-1.safetensors", {"a": (4,)})
    write_safetensors(folder / "m-2.safetensors", {"b": (2,)})
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    assert set(read_model(str(folder)).tensors) == {"a", "b"}

    (folder / "m-2.safetensors").unlink()
    with pytest.raises(ModelLoadFailed, match=r"1 of 2 weight files are missing .* m-2\.safetensors"):
        read_model(str(folder))


def break_by_cutting(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def break_header(folder):
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 40) + b"{" * 60)


def break_index(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"z": "model.safetensors"}}))


def break_out(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))


def break_config(folder):
    (folder / "config.json").write_text("{not json")


def break_config_meaning(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": "many"}))


def without_model_type(folder):
    (folder / "config.json").write_text("{}")


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def only_pickles(folder):
    without_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")


def empty(folder):
    for file in folder.iterdir():
        file.unlink()


def only_a_gguf(folder):
    empty(folder)
    (folder / "small.gguf").write_bytes(b"x")


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (break_by_cutting, ModelLoadFailed, r"cut off: \d+ bytes of \d+"),
        (break_header, ModelLoadFailed, "header is broken"),
        (break_index, ModelLoadFailed, "1 of 1 tensors .* z"),
        (break_out, ModelLoadFailed, "points outside"),
        (break_config, ModelLoadFailed, "is no JSON"),
        (break_config_meaning, ModelLoadFailed, "does not describe a language model"),
        (without_model_type, ModelLoadFailed, "names no model_type"),
        (without_weights, ModelLoadFailed, "holds no weights"),
        (only_pickles, ModelUnsupported, r"pytorch_model\.bin"),
        (empty, ModelNotFound, "is empty"),
        (only_a_gguf, ModelNotFound, r"small\.gguf"),
    ],
)
def test_a_broken_folder_gives_one_sentence(folder, damage, error, words):
    damage(folder)

    with pytest.raises(error, match=words) as raised:
        read_model(str(folder))

    assert "\n" not in str(raised.value)


def test_no_path_and_no_model_file_are_told_apart(tmp_path):
    with pytest.raises(ModelNotFound, match="no model at"):
        read_model(str(tmp_path / "nothing"))
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(ModelUnsupported, match=r"picture\.png is no model"):
        read_model(str(tmp_path / "picture.png"))


def gguf_bytes(*, arch="llama", cut=0, version=3, kind=0, splits=None):
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    def number(key, value):
        return text(key) + struct.pack("<II", 4, value)

    pairs = [text("general.architecture") + struct.pack("<I", 8) + text(arch)]
    numbers = {"block_count": 2, "context_length": 128, "embedding_length": 8, "attention.head_count": 2}
    pairs += [number(f"{arch}.{key}", value) for key, value in numbers.items()]
    tokens = b"".join(text(f"token {at}") for at in range(100))
    pairs.append(text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 100) + tokens)
    if splits:
        pairs.append(text("split.count") + struct.pack("<IH", 2, splits))
    tensor = text("blk.0.attn_q.weight") + struct.pack("<IQQIQ", 2, 8, 4, kind, 0)
    header = b"GGUF" + struct.pack("<IQQ", version, 1, len(pairs)) + b"".join(pairs) + tensor
    body = header + bytes(-len(header) % 32) + bytes(8 * 4 * 4)
    return body[: len(body) - cut]


def test_a_gguf_tells_what_it_is(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes())

    info = read_model(str(file))

    assert (info.format, info.architecture, info.context_len, info.num_layers, info.vocab_size) == (
        "gguf",
        "llama",
        128,
        2,
        100,
    )
    assert info.tensors["blk.0.attn_q.weight"].shape == (4, 8)
    assert info.kv.elements_per_token == 2 * 2 * (4 + 4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cut": 1}, ModelLoadFailed, r"cut off: \d+ bytes of \d+"),
        ({"cut": 200}, ModelLoadFailed, "damaged in its header"),
        ({"version": 1}, ModelUnsupported, "version 1"),
        ({"kind": 99}, ModelUnsupported, "ggml type 99"),
        ({"splits": 3}, ModelUnsupported, "one of 3 parts"),
    ],
)
def test_a_broken_gguf_gives_one_sentence(tmp_path, options, error, words):
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes(**options))

    with pytest.raises(error, match=words):
        read_model(str(file))


def test_the_real_gguf_agrees_with_the_folder_made_from_it(gguf_path, model_path):
    packed, folder = read_model(str(gguf_path)), read_model(str(model_path))

    assert (packed.kv, packed.context_len, packed.vocab_size) == (folder.kv, folder.context_len, folder.vocab_size)
    assert packed.num_parameters == folder.num_parameters


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
        ({"max_position_embeddings": 32768, "rope_scaling": None}, 32768),
    ],
)
def test_the_context_is_what_the_config_says_and_no_more(config, wanted):
    assert context_len_of(config) == wanted


def test_a_hybrid_caches_only_its_full_attention_layers():
    config = {
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": 5120,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }

    kv = kv_geometry(config)

    assert layer_types(config)[:4] == ["linear_attention"] * 3 + ["full_attention"]
    assert kv.elements_per_token * 2 == 64 * 1024
    assert kv.state_elements * 4 == 48 * 48 * 128 * 128 * 4


def test_keys_and_values_of_a_32b_take_256_kib_a_token(folder):
    shape = {"num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **shape}))
    info = read_model(str(folder))

    assert kv_bytes(info, 32768, "fp16", "fp16") == 32768 * 256 * 1024


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: (file.unlink(), file.symlink_to("gone")),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: file.write_bytes(struct.pack("<Q", 40000) + b'{"a":' * 8000),
    ],
    ids=["dangling link", "folder", "nested without end"],
)
def test_weights_that_cannot_be_read_are_told(spoil, folder):
    spoil(folder / "model.safetensors")

    with pytest.raises(ModelLoadFailed, match=r"^model\.safetensors of .* cannot be read: .*Download the file again"):
        read_model(str(folder))


@pytest.mark.parametrize(
    "config",
    ["[" * 100_000, json.dumps({**CONFIG, "hidden_size": float("inf")}), json.dumps({**CONFIG, "vocab_size": 1e999})],
    ids=["nested without end", "infinite width", "infinite vocabulary"],
)
def test_an_absurd_config_is_told(config, folder):
    (folder / "config.json").write_text(config)

    with pytest.raises(ModelLoadFailed, match=r"^config\.json of "):
        read_model(str(folder))


def test_an_empty_text_config_counts_for_nothing(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "text_config": None}))

    assert weights_bytes(read_model(str(folder)), "fp32") == 44


def gguf(*pairs):
    """A GGUF header of version 3 with one empty tensor: (key, kind of value, bytes of it) each."""
    keys = (struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value for key, kind, value in pairs)
    tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 0, 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(keys) + tensor + bytes(64)


@pytest.mark.parametrize(
    "raw",
    [
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63),
        gguf((b"a", 9, struct.pack("<IQ", 12, 2**60))),
        gguf((b"a", 9, struct.pack("<IQQ", 8, 65, 2**62))),
        gguf((b"a", 9, struct.pack("<IQ", 9, 1) * 2000)),
        gguf((b"general.alignment", 4, struct.pack("<I", 0))),
        gguf((b"general.alignment", 8, struct.pack("<Q", 1) + b"x")),
        gguf((b"split.count", 8, struct.pack("<Q", 1) + b"x")),
    ],
    ids=["long key", "long array", "long string", "nested arrays", "no alignment", "worded alignment", "worded parts"],
)
def test_a_gguf_of_absurd_counts_is_told(raw, tmp_path):
    (tmp_path / "m.gguf").write_bytes(raw)

    with pytest.raises(ModelLoadFailed, match=r"^m\.gguf "):
        read_model(str(tmp_path / "m.gguf"))


def test_a_gguf_whose_numbers_are_words_is_told(tmp_path):
    word = struct.pack("<Q", 1) + b"x"
    (tmp_path / "m.gguf").write_bytes(gguf((b"general.architecture", 8, word), (b"x.block_count", 8, word)))

    with pytest.raises(ModelLoadFailed, match=r"^m\.gguf does not describe"):
        read_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", ["pipe", "pipe.gguf"])
def test_what_is_neither_file_nor_folder_is_no_model(tmp_path, name):
    os.mkfifo(tmp_path / name)

    with pytest.raises(ModelUnsupported, match=f"^{name} is no model: choose a .gguf file, or a folder"):
        read_model(str(tmp_path / name))


def test_no_path_is_no_model_and_the_folder_one_stands_in_is_told_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelNotFound, match=r"^There is no model at ''\."):
        read_model("")
    with pytest.raises(ModelNotFound, match=f"^{tmp_path.name} is empty, so it is no model"):
        read_model(".")
