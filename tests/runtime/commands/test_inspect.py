import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import Prompt
from runtime.models.inspection import INSPECTIONS, inspect
from runtime.prompting.prompter import Prompter

ROOT = Path(__file__).parents[3]
QWEN35_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text", "num_hidden_layers": 64, "full_attention_interval": 4, "hidden_size": 5120,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
        "max_position_embeddings": 262144, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A model folder with one small tensor and no tokenizer; its config is Qwen3.5-27B's."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN35_27B))
    header = json.dumps({"w": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return tmp_path


def run(*words):
    command = [sys.executable, "-m", "runtime", "inspect", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_hybrid_counts_only_its_full_attention_layers(folder):
    facts = inspect(str(folder))

    assert facts["kv_cache"]["num_layers"] == 16
    assert facts["kv_cache"]["bytes_per_token"] == {
        "fp32": 131072,
        "fp16": 65536,
        "q8": 34816,
        "q6": 26624,
        "q4": 18432,
    }
    assert facts["kv_cache"]["state_bytes"] > 48 * 48 * 128 * 128 * 4
    assert facts["model"]["context_len"] == 262144


def test_the_lines_name_sizes_and_what_speaks_against_each_engine(folder):
    done = run(folder)

    assert done.returncode == 0, done.stderr
    assert "fp16  65536 bytes a token, 17.2 GB at full context" in done.stdout
    assert "8 bytes in 1 tensors: F16 8 bytes" in done.stdout
    assert "llamacpp      no: it reads gguf, and this is safetensors" in done.stdout


def test_a_missing_tokenizer_is_a_fact_not_a_failure(folder):
    assert inspect(str(folder))["tokenizer"]["fault"]


def test_json_has_every_inspection(folder):
    assert list(json.loads(run(folder, "--json").stdout)) == [*INSPECTIONS, "awq", "awq_report"]


def test_a_folder_without_quantisation_is_not_awq(folder):
    assert inspect(str(folder))["awq"] == "not_awq"


def test_a_damaged_awq_folder_gives_its_verdict_and_the_fault(folder):
    quant = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps({**QWEN35_27B, "quantization_config": quant}))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-4])

    facts = json.loads(run(folder, "--json").stdout)
    lines = run(folder).stdout

    assert facts["awq"] == "damaged"
    assert "cut off" in facts["fault"]
    assert lines.startswith("cannot load") and "AWQ            damaged: " in lines


@pytest.mark.parametrize("name", ["gone", "empty"])
def test_what_is_no_model_is_a_sentence_and_exit_code_1(tmp_path, name):
    (tmp_path / "empty").mkdir()

    done = run(tmp_path / name)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and name in done.stderr


def test_a_real_model_is_described_with_its_stop_token(model_path):
    pytest.importorskip("transformers")

    facts = inspect(str(model_path))

    assert facts["model"]["architecture"] == "LlamaForCausalLM"
    assert facts["kv_cache"]["bytes_per_token"]["fp16"] == 30 * 3 * 64 * 2 * 2
    assert (2, "<|im_end|>") in [(one["id"], one["text"]) for one in facts["tokenizer"]["stop"]]
    assert facts["tokenizer"]["fits_head"]
    assert facts["tokenizer"]["example"].endswith("<|im_start|>assistant\n")
    assert facts["engines"]["transformers"] is None


def test_a_gguf_file_is_described_from_its_own_metadata(gguf_path):
    facts = inspect(str(gguf_path))

    assert (facts["model"]["format"], facts["model"]["context_len"]) == ("gguf", 8192)
    assert facts["weights"]["bytes_by_dtype"].keys() >= {"Q4_1", "F32"}


def test_it_says_in_which_types_this_machine_will_run_it(model_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")

    here = inspect(str(model_path))["here"]
    [line] = [line for line in run(model_path).stdout.splitlines() if line.startswith("here")]

    assert (here["engine"], here["device"], here["dtype"], here["kv_cache"]) == ("transformers", "cpu", "fp32", "fp32")
    assert here["bytes_per_token"] == 30 * 3 * 64 * 2 * 4
    assert line == "here           transformers on cpu in fp32: 8192 tokens, 377.5 MB of fp32 KV cache"


def test_the_header_of_a_gguf_tells_what_its_tokenizer_would(gguf_path):
    pytest.importorskip("transformers")
    prompter, header = Prompter.load(str(gguf_path)), Prompter.of_header(str(gguf_path))
    prompt = Prompt.of("What does <|im_end|> mean?", system="Be brief.")

    whole, told = prompter.encode(prompt), header.encode(prompt)

    assert (told.text, told.stop, told.notes) == (whole.text, whole.stop, whole.notes)
    assert (told.reasoning.open_tag, told.reasoning.close_tag) == (whole.reasoning.open_tag, whole.reasoning.close_tag)
    assert header.vocab_size == prompter.vocab_size


def test_a_gguf_is_described_without_torch_and_transformers(gguf_path):
    pytest.importorskip("xllamacpp", reason="without llama.cpp it runs in transformers, whose device torch knows")
    code = (
        "import sys; from runtime.models.inspection import inspect\n"
        f"facts = inspect({str(gguf_path)!r}); print(facts['here']['engine'], facts['tokenizer']['num_ids'])\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout == "llamacpp 49152\n[]\n"
