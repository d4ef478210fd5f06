import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.errors import InvalidValue
from runtime.models.info import KVGeometry, ModelInfo
from runtime.serving import REPLACED, Card, ManagedServer, Plan, Wish, plan

ROOT = Path(__file__).parents[2]
H100 = Card(name="big", total_bytes=80_000_000_000)
SMALL = Card(name="small", total_bytes=24_000_000_000)


class Tensor:
    def __init__(self, nbytes):
        self.nbytes = nbytes


def model(*, weights_bytes=18_000_000_000, context_len=131_072, **fields):
    values = {
        "path": "/m/Qwen3-32B-AWQ",
        "format": "safetensors",
        "architecture": "Qwen3ForCausalLM",
        "model_type": "qwen3",
        "dtype": "float16",
        "quant_method": "awq",
        "quant_config": {},
        "context_len": context_len,
        "num_layers": 64,
        "kv": KVGeometry(num_layers=64, num_heads=8, key_dim=128, value_dim=128),
        "vocab_size": 151_936,
        "tensors": {"all": Tensor(weights_bytes)},
        "config": {},
    }
    return ModelInfo(**{**values, **fields})


def flag(made, name):
    return made.argv[made.argv.index(name) + 1]


def test_the_context_is_what_fits_beside_the_weights():
    made = plan(model(), Wish(served_name="q"), [SMALL], ["vllm", "serve"])

    room = 24e9 * 0.9 - 2e9 - 18e9
    per_token = 64 * 8 * 256 * 2
    assert int(flag(made, "--max-model-len")) == int(room / per_token) // 1024 * 1024
    assert any("awq" in note for note in made.notes)
    assert flag(made, "--reasoning-parser") == "qwen3"


def test_a_context_that_fits_whole_is_left_to_the_model():
    made = plan(model(), Wish(served_name="q"), [H100], ["vllm", "serve"])

    assert "--max-model-len" not in made.argv


def test_more_cards_hold_more():
    wish = Wish(served_name="q", tensor_parallel=2)

    alone = int(flag(plan(model(), Wish(served_name="q"), [SMALL], ["v"]), "--max-model-len"))
    both = int(flag(plan(model(), wish, [SMALL, SMALL], ["v"]), "--max-model-len"))

    assert both > 2 * alone
    assert flag(plan(model(), wish, [SMALL, SMALL], ["v"]), "--tensor-parallel-size") == "2"


def test_weights_that_do_not_fit_are_told_with_their_bytes():
    with pytest.raises(ValueError, match=r"62\.0 GB of weights over 1 cards do not fit into 90% of 24\.0 GB"):
        plan(model(weights_bytes=62_000_000_000), Wish(served_name="q"), [SMALL], ["v"])


def test_sleep_is_for_loopback_only():
    here = plan(model(), Wish(served_name="q"), [H100], ["v"])
    there = plan(model(), Wish(served_name="q", host="0.0.0.0"), [H100], ["v"])

    assert "--enable-sleep-mode" in here.argv
    assert here.env == {"VLLM_SERVER_DEV_MODE": "1"}
    assert "--enable-sleep-mode" not in there.argv
    assert there.env == {}


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_a_flag_that_is_gone_or_harms_is_answered_with_what_to_use(name):
    with pytest.raises(ValueError, match=f"^{name} is not for this: [A-Z].*[.]$"):
        plan(model(), Wish(served_name="q", extra=(f"{name}=1",)), [H100], ["v"])


def test_a_gguf_is_sent_to_the_engine_for_it():
    with pytest.raises(ValueError, match="llamacpp"):
        plan(model(format="gguf"), Wish(served_name="q"), [H100], ["v"])


@pytest.mark.parametrize("part", [0, -0.5, 1.5, float("nan"), float("inf")])
def test_a_part_of_a_card_that_is_none_is_told(part):
    with pytest.raises(InvalidValue, match=rf"^The GPU fraction is {part}; it runs from just above 0 to 1\.$"):
        Wish(served_name="q", gpu_fraction=part)


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_closing_ends_the_whole_group(capfd):
    server = ManagedServer(Plan(argv=(sys.executable, "-c", PARENT)), "http://127.0.0.1:9")
    for _ in range(200):
        if out := capfd.readouterr().out.strip():
            break
        time.sleep(0.05)
    child = int(out)
    assert is_alive(child)

    server.close()
    server.close()

    assert not is_alive(child)
    assert not is_alive(server.pid)


def test_the_command_ends_its_server_when_it_is_told_to_end(tmp_path):
    """A fake vLLM: it answers /health and has a child."""
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import http.server, subprocess, sys\n"
        "if '-c' in sys.argv: print('{}'); raise SystemExit\n"
        "raise SystemExit('unexpected')\n"
    )
    vllm = tmp_path / "vllm"
    vllm.write_text(
        f"#!{sys.executable}\n"
        "import http.server, pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        "http.server.HTTPServer(('127.0.0.1', port), Handler).serve_forever()\n"
    )
    for file in (python, vllm):
        file.chmod(0o755)
    folder = tmp_path / "m"
    folder.mkdir()
    write_tiny_model(folder)
    words = ["serve", str(folder), "--run", "--port", str(free_port()), "--python", str(python)]

    command = subprocess.Popen(
        [sys.executable, "-m", "runtime", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    shown, ready = command.stdout.readline(), command.stdout.readline()
    child = int((tmp_path / "child").read_text())
    was_alive = is_alive(child)
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=60)

    assert shown.startswith(str(vllm))
    assert ready.startswith("Ready at http://127.0.0.1:")
    assert was_alive
    assert not is_alive(child)


def free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def write_tiny_model(folder):
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "hidden_size": 4,
        "vocab_size": 8,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def test_a_vllm_that_is_not_there_is_told_with_how_to_get_it():
    from runtime.errors import EngineUnavailable

    with pytest.raises(EngineUnavailable, match="pip install vllm"):
        ManagedServer(Plan(argv=(os.path.join("nowhere", "vllm"),)), "http://127.0.0.1:9")


@pytest.mark.parametrize(
    "launcher, begins",
    [
        (("vllm", "serve"), ["vllm", "serve", "MODEL", "--served-model-name"]),
        (("python", "-m", "x.api_server"), ["python", "-m", "x.api_server", "--model", "MODEL"]),
    ],
)
def test_the_model_stands_where_that_launcher_wants_it(launcher, begins):
    argv = list(plan(model(), Wish(served_name="m"), [], launcher).argv)

    assert argv[: len(begins)] == [model().path if word == "MODEL" else word for word in begins]
