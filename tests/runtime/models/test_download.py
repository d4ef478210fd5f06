import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from runtime.errors import EngineUnavailable, ModelLoadFailed, ModelNotFound, ModelUnsupported, ResidentError
from runtime.models import download as module
from runtime.models import hub as hub_module
from runtime.models.download import FACTS_FILE, PARTIAL, download
from runtime.models.folders import _models
from runtime.models.hub import HubFile, HubRepo
from tests.hub_server import SHA, serving
from tests.imports import ROOT

WEIGHTS = bytes(range(256)) * 12_000
FOLDER = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "tokenizer.model": b"spm",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": WEIGHTS,
    "pytorch_model.bin": WEIGHTS,
    "modeling_evil.py": b"import os",
    "onnx/config.json": b"{}",
    "onnx/model.onnx": WEIGHTS,
    "README.md": b"hello",
}
NEEDED = ["chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer.model"]
GGUF = {"config.json": b"{}", "m-Q4_K_M.gguf": WEIGHTS, "m-Q8_0.gguf": WEIGHTS}


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub.constants

    with serving({"owner/good": dict(FOLDER), "owner/many": dict(GGUF)}) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield hub


def drain(making):
    while True:
        try:
            next(making)
        except StopIteration as end:
            return end.value


def test_a_folder_holds_what_a_model_needs_and_neither_code_nor_pickles(hub, tmp_path):
    folder = drain(download("owner/good", tmp_path))

    assert list(tmp_path.iterdir()) == [folder] == [tmp_path / "good"]
    assert sorted(path.name for path in folder.iterdir() if path.name != FACTS_FILE) == NEEDED
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    facts = json.loads((folder / FACTS_FILE).read_text())
    assert (facts["repo"], facts["revision"]) == ("owner/good", SHA)


def test_progress_ends_at_the_total_and_never_falls(hub, tmp_path):
    told = [one for one in download("owner/good", tmp_path) if one.total]

    done = [one.done for one in told]
    assert done == sorted(done)
    assert done[-1] == told[-1].total == sum(len(FOLDER[name]) for name in NEEDED)


def test_what_is_there_is_not_asked_for_again(hub, tmp_path):
    drain(download("owner/good", tmp_path))
    hub.files.clear()

    assert list(download("owner/good", tmp_path)) == []
    assert list(download("owner/good", tmp_path, revision=SHA[:8])) == []


def test_another_revision_or_another_model_is_never_put_over_one_that_is_there(hub, tmp_path):
    drain(download("owner/good", tmp_path))
    (tmp_path / "many").mkdir()

    with pytest.raises(ResidentError, match=f"holds owner/good at revision {SHA[:12]}.*--into"):
        next(download("owner/good", tmp_path, revision="ffff"))
    with pytest.raises(ResidentError, match="is there already, and is not a download of owner/many"):
        next(download("owner/many", tmp_path))


def test_a_closed_download_is_listed_nowhere_and_the_next_one_goes_on_from_there(hub, tmp_path):
    hub.pause_s = 0.005
    fetching = download("owner/good", tmp_path)
    for progress in fetching:
        if progress.what == "model.safetensors" and progress.done > 300_000:
            break
    fetching.close()
    assert not (tmp_path / "good").exists() and (tmp_path / PARTIAL).is_dir()
    assert _models(tmp_path) == []
    hub.pause_s = 0
    hub.sent.clear()

    folder = drain(download("owner/good", tmp_path))

    [start] = [start for name, start, _ in hub.sent if name == "model.safetensors"]
    assert start > 0
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_a_broken_connection_is_told_and_the_same_again_makes_it_whole(hub, tmp_path, ranges):
    hub.ranges, hub.cut_after = ranges, 2_000_000

    with pytest.raises(ResidentError, match=r"model\.safetensors.*goes on where it stopped"):
        drain(download("owner/good", tmp_path))
    hub.cut_after = None

    assert (drain(download("owner/good", tmp_path)) / "model.safetensors").read_bytes() == WEIGHTS


def test_damaged_bytes_are_told_and_fetched_anew(hub, tmp_path):
    partial = tmp_path / PARTIAL / f"good-{SHA[:16]}"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"\xff" * 1000)

    with pytest.raises(ModelLoadFailed, match="came damaged"):
        drain(download("owner/good", tmp_path))

    assert (drain(download("owner/good", tmp_path)) / "model.safetensors").read_bytes() == WEIGHTS


def test_the_token_goes_to_the_hub_and_not_to_the_host_of_the_bytes(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils.build_hf_headers", lambda **_: {"authorization": "Bearer secret"})

    drain(download("owner/good", tmp_path))

    assert len(hub.sent) == len(NEEDED)
    assert {key for _, _, key in hub.sent} == {None}


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("gated", r"owner/good is gated: accept its licence at http://127.0.0.1:\d+/owner/good, then set HF_TOKEN"),
        ("missing", r"has no model owner/good, or it is private"),
        ("no-revision", r"owner/good has no revision 'old'"),
    ],
)
def test_a_refusal_of_the_hub_is_one_sentence(hub, tmp_path, fault, sentence):
    hub.faults["owner/good"] = fault

    with pytest.raises(ModelNotFound, match=sentence):
        drain(download("owner/good", tmp_path, revision="old"))


def test_no_network_and_offline_mode_are_one_sentence_each(hub, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ResidentError, match=r"http://127.0.0.1:9 does not answer .*HF_ENDPOINT to a mirror"):
        drain(download("owner/good", tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ResidentError, match="HF_HUB_OFFLINE is set"):
        drain(download("owner/good", tmp_path))


def test_a_full_disk_is_told_with_numbers_before_the_first_byte(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Disk", (), {"free": 500_000_000}))

    with pytest.raises(ResidentError, match=r"needs 3\.1 MB more and 1\.0 GB to spare, but .* has 500\.0 MB free"):
        drain(download("owner/good", tmp_path))

    assert hub.sent == []


def test_one_of_several_gguf_files_must_be_chosen(hub, tmp_path):
    with pytest.raises(ModelUnsupported, match=r"2 GGUF models: m-Q4_K_M\.gguf, m-Q8_0\.gguf.*--only"):
        drain(download("owner/many", tmp_path))

    folder = drain(download("owner/many", tmp_path, only="*Q4_K_M*"))

    assert sorted(path.name for path in folder.iterdir()) == ["m-Q4_K_M.gguf", FACTS_FILE]


def repo(*names):
    return HubRepo(repo="o/n", revision=SHA, files=tuple(HubFile(name=name, num_bytes=1) for name in names))


def test_shards_of_one_gguf_are_one_model():
    names = ["Q8/m-00001-of-00002.gguf", "Q8/m-00002-of-00002.gguf"]

    assert [file.name for file in module.wanted(repo(*names))] == names


@pytest.mark.parametrize("name", ["../up.safetensors", "/abs.safetensors", "C:\\x.safetensors", "a\0.safetensors"])
def test_a_name_that_leaves_the_folder_is_never_written(name):
    with pytest.raises(ModelUnsupported, match="neither safetensors nor GGUF"):
        module.wanted(repo(name))


@pytest.mark.parametrize("name", ["../x", "a/b/c", "https://x/y", "a b/c", "", "a/.."])
def test_what_is_no_repository_is_refused_without_asking(name):
    with pytest.raises(ModelNotFound, match="is no repository"):
        hub_module.find(name)


def test_without_the_library_the_sentence_says_where_it_comes_from(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(EngineUnavailable, match="ComfyUI's Python"):
        hub_module.find("a/b")


def test_the_command_fetches_from_a_mirror_and_prints_the_folder(hub, tmp_path):
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    words = [sys.executable, "-m", "runtime", "download", "owner/good", "--into", str(tmp_path)]

    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    offline = subprocess.run(
        [*words, "--revision", "x"], cwd=ROOT, env={**env, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )

    assert (done.returncode, Path(done.stdout.strip())) == (0, tmp_path / "good"), done.stderr
    assert f"revision {SHA}" in done.stderr and "3.1 MB into" in done.stderr
    assert (offline.returncode, offline.stdout) == (1, "")


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("at", ["mkdir", "write_text", "replace"])
def test_a_disk_that_is_full_at_any_step_is_told_and_keeps_what_has_come(hub, tmp_path, monkeypatch, at):
    with monkeypatch.context() as broken:
        broken.setattr(Path, at, full_disk)
        with pytest.raises(ModelLoadFailed, match=r"cannot be written: No space left on device\. Free some disk space"):
            drain(download("owner/good", tmp_path))

    assert not (tmp_path / "good").exists()
    assert (drain(download("owner/good", tmp_path)) / "model.safetensors").read_bytes() == WEIGHTS
