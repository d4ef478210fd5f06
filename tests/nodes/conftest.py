"""Fixtures for the nodes: the pack on a stub host, and scripted models on the real one."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import pytest

from tests.nodes.stub_host import ROOT, load_pack, stub_modules
from tools.comfyui import PACK_NAME

PACK = "resident_llm_on_stubs"
REPLY = "A lighthouse of blue glass above the sea, for {prompt}"


@pytest.fixture(scope="session")
def stubs(tmp_path_factory):
    return stub_modules(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def pack(stubs):
    """Get a module of the pack by its name below the pack, imported without ComfyUI."""
    kept = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    load_pack(PACK)

    def get(name):
        return importlib.import_module(f"{PACK}.{name}")

    get("nodes")
    for name, module in kept.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module
    return get


SCRIPTS = {
    "script-quick": {"reply": REPLY},
    "script-slow": {"reply": REPLY * 2, "step_s": 0.01, "load_steps": 50, "prefill_steps": 50},
    "script-picky": {"reply": REPLY, "fail_on": "forbidden"},
    "script-markup": {"reply": "<img src=x onerror='window.wasRun=1'> **bold** {prompt}"},
    "script-long": {"reply": "word " * 400 + "end", "step_s": 0.02, "tokens_per_step": 8},
    "script-heavy": {
        "reply": "word " * 400 + "end",
        "step_s": 0.02,
        "tokens_per_step": 8,
        "weights_bytes": 500_000_000,
    },
    "script-thinks": {"reply": "<think>A cat, then.</think>" + REPLY, "step_s": 0.01},
}


@pytest.fixture(scope="session")
def script_models(tmp_path_factory) -> list[Path]:
    """Folders of scripted models, each a config.json that says what the model does."""
    root = tmp_path_factory.mktemp("scripts")
    for name, script in SCRIPTS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(script))
    return sorted(root.iterdir())


@pytest.fixture
def scripted(comfy_with, script_models):
    """The shared server with scripted models in its menu, and a node that makes lists."""
    packs = {PACK_NAME: ROOT, "list-pack": Path(__file__).parent / "list_pack"}
    return comfy_with(models=script_models, packs=packs, env={"RESIDENT_LLM_SCRIPTED": "1"})


def load_llm(model="script-quick", **inputs):
    """The API form of a Load LLM node."""
    defaults = {"engine": "scripted", "device": "auto", "dtype": "auto", "attention": "auto", "context_len": 0}
    values = {"model": model, **defaults, "kv_cache": "auto", "when_idle": "keep", "host_copy_gb": -1, **inputs}
    return {"class_type": "ResidentLoadLLM", "inputs": values}


def prompt_node(user="a cat", system=""):
    return {"class_type": "ResidentPrompt", "inputs": {"system": system, "user": user}}


def generate(llm="1", prompt="2", **inputs):
    """The API form of a Generate Text node, wired to the nodes with these ids."""
    defaults = {"max_tokens": 0, "seed": 7, "thinking_budget": 0, "on_cut_thinking": "error"}
    return {"class_type": "ResidentGenerate", "inputs": {"llm": [llm, 0], "prompt": [prompt, 0], **defaults, **inputs}}


def graph(model="script-quick", user="a cat", **inputs):
    """Load LLM (1), LLM Prompt (2) and Generate Text (3)."""
    return {"1": load_llm(model), "2": prompt_node(user), "3": generate(**inputs)}


def free(**inputs):
    """The API form of a Free LLM Memory node."""
    return {"class_type": "ResidentFree", "inputs": {"drop_host_copies": True, **inputs}}


def interrupted(comfy, prompt, phase, delay_s):
    """Run a prompt and interrupt it some time after it has come to a phase."""
    is_done = False

    def on_event(event):
        nonlocal is_done
        if not is_done and event.type == "resident.stream" and event.data["phase"] == phase:
            is_done = True
            time.sleep(delay_s)
            comfy.interrupt()

    return comfy.run_prompt(prompt, on_event=on_event)
