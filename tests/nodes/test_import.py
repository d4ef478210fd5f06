import json
import subprocess
import sys

import pytest

from tests.nodes.stub_host import ROOT

PROBE = """
import asyncio, json, logging, os, socket, sys, threading
from pathlib import Path
from tests.nodes.stub_host import load_pack, stub_modules

BLOCKED = {blocked!r}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(name + " is blocked")

def refuse(*_, **__):
    raise AssertionError("no thread and no socket may be made")

sys.modules.update(stub_modules(Path({models!r})))
import unittest.mock
sys.meta_path.insert(0, Blocker())
threading.Thread.start = refuse
socket.socket.connect = socket.socket.bind = refuse
before = set(sys.modules)

def state():
    root = logging.root
    return dict(os.environ), list(sys.path), list(root.handlers), root.level, len(threading.enumerate())

at_first = state()
pack = load_pack()
after_pack = set(sys.modules)
extension = asyncio.run(pack.comfy_entrypoint())
nodes = {{node.__name__ for node in sys.modules["resident_llm.nodes"].NODES}}
print(json.dumps({{
    "by_pack": sorted(after_pack - before),
    "loaded": sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}),
    "nodes": sorted(nodes),
    "is_same_state": state() == at_first,
}}))
"""
HEAVY = ["torch", "transformers", "tokenizers", "numpy", "safetensors", "gguf", "PIL", "jinja2", "aiohttp", "httpx"]
HEAVY += ["exllamav2", "exllamav3", "llama_cpp", "vllm", "pynvml", "psutil", "flash_attn", "triton", "bitsandbytes"]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """What a fresh interpreter tells after importing the pack with every optional package blocked."""
    script = PROBE.format(blocked=HEAVY, models=str(tmp_path_factory.mktemp("models")))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_node_registers_with_all_optional_packages_blocked(probed):
    assert {"LoadLLM", "LLMPrompt", "LLMSampling", "Generate", "Free"} <= set(probed["nodes"])


def test_the_pack_loads_nothing_heavy(probed):
    assert not set(probed["loaded"]) & set(HEAVY)


def test_importing_the_pack_alone_loads_none_of_its_parts(probed):
    assert probed["by_pack"] == ["resident_llm"]


def test_importing_changes_no_global_state(probed):
    assert probed["is_same_state"]


def test_every_python_file_of_the_pack_is_ascii():
    files = [ROOT / "__init__.py", *(ROOT / "nodes").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")]

    not_ascii = [str(file) for file in files if not file.read_bytes().isascii()]

    assert not not_ascii
