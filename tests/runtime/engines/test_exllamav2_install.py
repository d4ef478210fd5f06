"""Installing, building and importing ExLlamaV2, with stand-ins for what this machine has or lacks."""

import doctest
import importlib.machinery
import os
import sys
from pathlib import Path

import pytest

from runtime.engines import exllamav2_build, exllamav2_install, exllamav2_sdk
from runtime.engines.exllamav2_install import advice, wheel_name, why_no_wheel
from runtime.errors import EngineUnavailable
from runtime.wheels import Platform


def place(python="3.12.3", torch="2.8.0+cu128", cuda="12.8", system="linux_x86_64"):
    return Platform(python=python, torch=torch, cuda=cuda, system=system)


@pytest.mark.parametrize(
    ("here", "name"),
    [
        (place(), "exllamav2-0.3.2+cu128.torch2.8.0-cp312-cp312-linux_x86_64.whl"),
        (place(torch="2.9.1+cu128"), "exllamav2-0.3.2+cu128.torch2.9.0-cp312-cp312-linux_x86_64.whl"),
        (place("3.11.7", "2.6.0+cu124", "12.4"), "exllamav2-0.3.2+cu124.torch2.6.0-cp311-cp311-linux_x86_64.whl"),
        (place("3.10.1", "2.5.1+cu118", "11.8"), "exllamav2-0.3.2+cu118.torch2.5.0-cp310-cp310-linux_x86_64.whl"),
        (
            place("3.13.0", "2.7.1+cu128", system="win_amd64"),
            "exllamav2-0.3.2+cu128.torch2.7.0-cp313-cp313-win_amd64.whl",
        ),
    ],
)
def test_the_exact_wheel_is_named(here, name):
    assert wheel_name(here) == name
    assert name in advice(here)


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (place(torch="2.11.0+cu130", cuda="13.0"), "wheels end at torch 2.9 (and begin at 2.3); torch here is 2.11.0"),
        (place(torch="2.9.0+cu130", cuda="13.0"), "wheels for torch 2.9 are for CUDA 128; torch here has CUDA 13.0"),
        (place(torch="2.13.0+cpu", cuda=None), "torch 2.13.0+cpu is a CPU build"),
        (place(python="3.14.0"), "wheels are for Python 3.10 to 3.13; this is 3.14.0"),
        (place("3.13.0", "2.5.0+cu121", "12.1", "win_amd64"), "wheels for Python 3.13 begin at torch 2.6"),
        (place(system="linux_aarch64"), "there are no wheels for linux_aarch64"),
        (place(torch=None, cuda=None), "torch is not installed"),
    ],
)
def test_where_no_wheel_fits_the_reason_is_told_with_what_is_left(here, reason):
    assert reason in why_no_wheel(here)
    assert reason in advice(here)
    assert ("build exllamav2" if here.cuda else "another engine" if False else "engine") in advice(here)


def test_the_examples_in_the_docstrings_hold():
    for module in (exllamav2_install, exllamav2_build):
        assert doctest.testmod(module).failed == 0


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder on the path for stand-in packages; what they put into sys.modules is taken out again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("exllamav2", "flash_attn", "xformers")
    for name in [one for one in sys.modules if one.split(".")[0] in (*names, "exllamav2_ext", "flash_attn_2_cuda")]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in (*names, "exllamav2_ext", "flash_attn_2_cuda"):
            del sys.modules[name]


def write_sdk(folder, has_paged=True, has_extension=True):
    """A package that dies, as the real one does, of a flash-attn that is there but broken."""
    for path, text in {
        "exllamav2/__init__.py": "from . import attn",
        "exllamav2/attn.py": (
            "import os\n"
            "switches = {k for k in os.environ if k.startswith('EXLLAMA_NO')}\n"
            "has_flash_attn_with_paged = False\n"
            "if 'EXLLAMA_NO_FLASH_ATTN' not in os.environ:\n"
            "    try:\n"
            "        import flash_attn\n"
            "        [int(t) for t in flash_attn.__version__.split('.') if t.isdigit()]\n"
            f"        has_flash_attn_with_paged = {has_paged}\n"
            "    except ModuleNotFoundError: pass\n"
        ),
        "exllamav2/generator.py": "",
        "exllamav2/version.py": "__version__ = '0.3.2'",
        **({"exllamav2_ext.py": ""} if has_extension else {}),
    }.items():
        file = folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


BROKEN = {
    "another torch's": {"flash_attn/__init__.py": "raise ImportError('undefined symbol: _ZN3c104')"},
    "a namespace left over": {"flash_attn/cute/__init__.py": ""},
    "without its compiled part": {"flash_attn/__init__.py": "__version__ = '2.8.3'"},
    "too old": {
        "flash_attn/__init__.py": (
            "__version__ = '2.5.6'\nflash_attn_func = flash_attn_varlen_func = flash_attn_with_kvcache = None"
        ),
        "flash_attn_2_cuda.py": "",
    },
}


@pytest.mark.parametrize("files", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_flash_attn_does_not_break_the_import_and_leaves_no_trace(packages, files):
    write_sdk(packages)
    for path, text in files.items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_text(text)
    before = dict(os.environ)

    sdk = exllamav2_sdk.open_sdk()

    assert sdk.flash_fault
    assert sdk.attention.switches == {"EXLLAMA_NO_FLASH_ATTN", "EXLLAMA_NO_XFORMERS"}
    assert dict(os.environ) == before


def test_a_sound_flash_attn_is_used(packages):
    write_sdk(packages)
    (packages / "flash_attn").mkdir()
    (packages / "flash_attn" / "__init__.py").write_text(
        "__version__ = '2.8.3.post2'\nflash_attn_func = flash_attn_varlen_func = flash_attn_with_kvcache = None"
    )
    (packages / "flash_attn_2_cuda.py").write_text("")

    sdk = exllamav2_sdk.open_sdk()

    assert (sdk.flash_fault, sdk.version) == (None, "0.3.2")
    assert sdk.attention.switches == {"EXLLAMA_NO_XFORMERS"}


def test_an_sdk_without_its_compiled_part_is_never_imported(packages):
    write_sdk(packages, has_extension=False)

    with pytest.raises(EngineUnavailable, match="ExLlamaV2"):
        exllamav2_sdk.open_sdk()

    assert "exllamav2" not in sys.modules


def test_an_extension_that_build_compiled_is_found_and_the_path_is_as_before(packages, tmp_path, monkeypatch):
    write_sdk(packages, has_extension=False)
    suffix = importlib.machinery.EXTENSION_SUFFIXES[-1]
    built = tmp_path / "extensions" / "exllamav2_ext" / f"exllamav2_ext{suffix}"
    built.parent.mkdir(parents=True)
    built.write_bytes(b"")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    path = list(sys.path)

    assert exllamav2_install.built_extension() == built
    exllamav2_sdk.open_sdk()

    assert sys.path == path


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.setattr(exllamav2_build, "check_tools", lambda: None)
    monkeypatch.setattr(exllamav2_build, "POLL_S", 0.01)


def test_a_build_shows_progress_and_ends(tools):
    lines = list(exllamav2_build.build(num_jobs=1, code="import time; time.sleep(0.1)"))

    assert lines[0].startswith("compiling: ")


def test_a_build_that_fails_gives_the_compilers_words(tools):
    code = "print('[1/47] nvcc ...\\n' * 50 + 'q_gemm.cu(10): error: no instance of function'); raise SystemExit(1)"

    with pytest.raises(EngineUnavailable, match=r"Compiling ExLlamaV2 failed:\nq_gemm\.cu\(10\): error: no instance"):
        list(exllamav2_build.build(num_jobs=1, code=code))


def test_closing_a_build_ends_the_compiler(tools, tmp_path):
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    building = exllamav2_build.build(num_jobs=1, code=code)
    while not (mark.exists() and mark.read_text()):
        next(building)

    building.close()

    assert not Path(f"/proc/{mark.read_text()}").exists()


def test_without_cuda_a_build_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setattr(exllamav2_build, "here", lambda: place(torch="2.13.0+cpu", cuda=None))

    with pytest.raises(EngineUnavailable, match="is a CPU build"):
        next(exllamav2_build.build(num_jobs=1))


def test_the_table_says_why_it_cannot_run_here_without_importing_torch(monkeypatch):
    monkeypatch.setattr(exllamav2_install, "here", lambda: place(torch="2.13.0+cpu", cuda=None))

    assert "is a CPU build, and ExLlamaV2 runs on CUDA only" in exllamav2_install.why_unavailable()
