"""The arrows of ARCHITECTURE.md, and what an import may not do."""

import ast
import json
import subprocess
import sys
import textwrap

import pytest

from runtime import commands
from runtime.engines import ENGINES
from tests.imports import ROOT, files, imports, is_standard, name_of

LEAVES = {"runtime.request", "runtime.events", "runtime.errors", "runtime.telemetry"}
COMFYUI = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "execution", "folder_paths", "server", "nodes"}
HOST_FILES = {"nodes.host", "nodes.residency"}
SDKS = {"transformers", "exllamav2", "exllamav3", "llama_cpp", "vllm", "flash_attn", "gptqmodel", "accelerate"}
HEAVY = SDKS | {"torch", "numpy", "tokenizers", "safetensors", "gguf", "aiohttp", "httpx", "PIL"}
STEERING = {"runtime", "runtime.runtime", "runtime.stream", "runtime.collect", "runtime.benchmark"}


def broken(condition):
    """The imports that break a rule, as text."""
    return [str(one) for one in imports() if condition(one)]


def within(module, package):
    return module == package or module.startswith(f"{package}.")


def engine_of(module):
    """The engine whose adapter the module belongs to: engines/<module>.py, or a part <module>_....py; None if none."""
    name = module.removeprefix("runtime.engines.") if module.startswith("runtime.engines.") else ""
    first = name.partition(".")[0]
    return next((row.module for row in ENGINES if first == row.module or first.startswith(f"{row.module}_")), None)


def test_our_own_modules_are_imported_relatively():
    ours = {"runtime", "nodes", "resident_llm"}

    assert broken(lambda one: not one.is_relative and one.top in ours) == []


def test_leaves_import_nothing_of_ours_but_each_other():
    assert broken(lambda one: one.by in LEAVES and one.is_ours and one.of not in LEAVES) == []


def test_the_runtime_does_not_know_the_nodes_or_comfyui():
    assert (
        broken(
            lambda one: (
                within(one.by, "runtime")
                and ((one.is_ours and not within(one.of, "runtime")) or (not one.is_ours and one.top in COMFYUI))
            )
        )
        == []
    )


def test_only_host_and_residency_know_comfyuis_internals():
    allowed = {"comfy_api"}

    assert broken(lambda one: not one.is_ours and one.top in COMFYUI - allowed and one.by not in HOST_FILES) == []


def test_nodes_reach_no_engine_directly():
    assert broken(lambda one: within(one.by, "nodes") and engine_of(one.of) is not None) == []


def test_engines_do_not_know_who_steers_them():
    def steers(one):
        return within(one.by, "runtime.engines") and one.is_ours and one.of in STEERING

    assert broken(steers) == []


BUILT_ON = {("llamacpp", "openai")}
"""llama.cpp runs as a server of our own, in its own process: its engine is the client with that server behind it."""


def test_an_engine_imports_no_other_engine():
    def is_foreign(one):
        mine, other = engine_of(one.by), engine_of(one.of)
        return None not in (mine, other) and mine != other and (mine, other) not in BUILT_ON

    assert broken(is_foreign) == []


def test_an_engines_sdk_is_imported_by_that_engine_only():
    of_an_engine = {"transformers", "exllamav2", "exllamav3", "llama_cpp", "vllm"}

    def is_foreign(one):
        mine = engine_of(one.by)
        return not one.is_ours and one.top in of_an_engine and mine is not None and one.top != mine

    assert broken(is_foreign) == []


def loaded_by(start):
    """Every module of ours that importing `start` runs, its packages included."""
    edges = [(one.by, one.of) for one in imports() if one.is_ours and not one.is_lazy]
    found, waiting = set(), [start]
    while waiting:
        parts = waiting.pop().split(".")
        for name in {".".join(parts[:end]) for end in range(1, len(parts) + 1)} - found:
            found.add(name)
            waiting += [of for by, of in edges if by == name]
    return found


def test_the_process_of_llamacpp_starts_without_the_pack():
    child = "runtime.engines.llamacpp_child"

    assert {one.of for one in imports() if one.by == child and not is_standard(one.top)} == {"xllamacpp"}


def test_torch_and_engine_sdks_are_imported_by_engines_only():
    def is_heavy(one):
        is_free = one.by in HOST_FILES or within(one.by, "runtime.engines")  # ComfyUI has torch before any node
        return not one.is_ours and one.top in SDKS | {"torch"} and not one.is_lazy and not is_free

    assert broken(is_heavy) == []


# The table's checks of an engine (<engine>_install.py) are loaded with it; they are as light as the rest.
START = ["runtime", "nodes", "runtime.__main__", *(f"runtime.commands.{name}" for name in commands.names())]


@pytest.mark.parametrize("start", START)
def test_no_engine_and_nothing_heavy_is_loaded_before_a_model_is(start):
    loaded = loaded_by(start) - HOST_FILES

    assert {name for name in loaded if engine_of(name) and not name.endswith("_install")} == set()
    assert broken(lambda one: one.by in loaded and not one.is_ours and one.top in HEAVY and not one.is_lazy) == []


def test_leaves_and_the_seam_need_only_the_standard_library():
    light = LEAVES | {"runtime.stream", "runtime.collect", "runtime.runtime", "runtime.engines.base"}

    assert broken(lambda one: one.by in light and not one.is_ours and not is_standard(one.top)) == []


def test_source_is_ascii_and_no_file_is_longer_than_400_lines():
    texts = {name_of(file) or "pack": file.read_bytes() for file in files()}

    assert [name for name, text in texts.items() if not text.isascii()] == []
    assert [name for name, text in texts.items() if text.count(b"\n") > 400] == []


def test_library_code_keeps_to_the_syntax_of_python_3_10():
    for file in files():
        ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 10))


GUARD = """
import json, logging, os, random, signal, socket, subprocess, sys, threading, warnings

def refuse(*args, **kwargs):
    raise AssertionError("an import touched the network or started a process")

socket.socket.connect = socket.socket.bind = refuse
socket.getaddrinfo = socket.create_connection = refuse
subprocess.Popen.__init__ = refuse
os.system = refuse

def state():
    logger = logging.getLogger()
    return {
        "environ": dict(os.environ),
        "logging": [logger.level, [repr(h) for h in logger.handlers], logging.root.manager.disable],
        "warnings": repr(warnings.filters),
        "random": repr(random.getstate()),
        "path": list(sys.path),
        "meta_path": [repr(one) for one in sys.meta_path],
        "signals": {str(n): repr(signal.getsignal(n)) for n in signal.valid_signals()},
        "threads": [one.name for one in threading.enumerate()],
        "cwd": os.getcwd(),
        "excepthook": repr(sys.excepthook),
        "recursion": sys.getrecursionlimit(),
    }
"""
IMPORT_RUNTIME = "import runtime"
IMPORT_PACK = """
import importlib.util
name = root.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, os.path.join(root, "__init__.py"))
pack = importlib.util.module_from_spec(spec)
sys.modules[name] = pack
spec.loader.exec_module(pack)
"""
REPORT = """
after = state()
print(json.dumps({
    "changed": [key for key in before if before[key] != after[key]],
    "heavy": sorted({name.partition(".")[0] for name in sys.modules} & set(heavy)),
}))
"""


def in_fresh_interpreter(code):
    """What importing changes and loads, in a process of its own."""
    setup = f"root = {str(ROOT)!r}; heavy = {sorted(HEAVY)!r}; sys.path.insert(0, root)\n"
    script = GUARD + setup + "before = state()\n" + textwrap.dedent(code) + REPORT
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("code", [IMPORT_RUNTIME, IMPORT_PACK], ids=["runtime", "pack"])
def test_an_import_loads_nothing_heavy_and_leaves_the_process_as_it_was(code):
    assert in_fresh_interpreter(code) == {"changed": [], "heavy": []}


@pytest.mark.parametrize(
    "deed",
    [
        "import threading; threading.Thread(target=__import__('time').sleep, args=(5,), daemon=True).start()",
        "import logging; logging.basicConfig()",
        "os.environ['X_RESIDENT'] = '1'",
        "import random; random.seed(1)",
        "sys.path.append('/tmp')",
        "warnings.simplefilter('ignore')",
    ],
)
def test_the_check_above_would_see(deed):
    assert in_fresh_interpreter(deed)["changed"] != []


def test_the_check_above_would_see_a_connection():
    with pytest.raises(AssertionError, match="touched the network"):
        in_fresh_interpreter("import socket; socket.create_connection(('127.0.0.1', 9))")


def test_importing_every_command_is_light():
    code = "from runtime import commands\nfor name in commands.names(): commands.load(name)\n"

    assert in_fresh_interpreter(code) == {"changed": [], "heavy": []}
