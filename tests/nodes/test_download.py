import pytest

from tests.hub_server import serving

pytest.importorskip("huggingface_hub")


@pytest.fixture
def node(pack, monkeypatch, tmp_path):
    """The node's module, with its list and its model folder below a folder of the test."""
    module = pack("nodes.download")
    monkeypatch.setattr(module.host, "system_user_folder", lambda: str(tmp_path))
    monkeypatch.setattr(module.host, "llm_folders", lambda: [str(tmp_path / "LLM")])
    return module


def allow(tmp_path, text):
    (tmp_path / "allowed_downloads.txt").write_text(text)


def test_the_list_is_one_repository_a_line_with_remarks(node, tmp_path):
    allow(tmp_path, "# mine\nQwen/Qwen3-4B\n\n  owner/good  # small\n")

    assert node.allowed() == ["Qwen/Qwen3-4B", "owner/good"]


def test_a_repository_that_is_not_on_the_list_gets_the_command_and_is_not_fetched(node, tmp_path, pack, monkeypatch):
    allow(tmp_path, "owner/good\n")
    monkeypatch.setattr(pack("runtime.models.download"), "download", lambda *_, **__: pytest.fail("it was fetched"))

    sentence = node.Download.validate_inputs("stranger/huge")

    assert "/runtime download stranger/huge" in sentence and str(tmp_path) in sentence
    with pytest.raises(pack("runtime.errors").ModelNotFound):
        node.Download.execute("stranger/huge")


def test_an_empty_list_says_how_to_begin(node):
    assert "Your list of downloads is empty" in node.Download.validate_inputs(node.NONE_ALLOWED)


def test_a_wired_name_is_judged_when_it_is_known(node):
    assert node.Download.validate_inputs(None) is True


def allowed_graph(repo="owner/good"):
    inputs = {"repo": repo, "revision": "", "only": ""}
    return {"1": {"class_type": "ResidentDownload", "inputs": inputs}}


WEIGHTS = bytes(range(256)) * 40_000


@pytest.fixture(scope="module")
def hub():
    with serving({"owner/good": {"config.json": b"{}", "model.safetensors": WEIGHTS}}) as one:
        yield one


@pytest.mark.server
def test_in_comfyui_it_fetches_what_is_on_the_list_stops_on_cancel_and_goes_on(hub, comfy_with):
    comfy = comfy_with(models=[], env={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"})
    refused = comfy.run_prompt(allowed_graph())
    folder = comfy.base / "user" / "__resident_llm"
    folder.mkdir(parents=True, exist_ok=True)
    allow(folder, "owner/good\n")
    hub.pause_s = 0.05

    def on_event(event):
        if event.type in ("progress", "progress_state") and hub.sent:
            comfy.interrupt()

    stopped = comfy.run_prompt(allowed_graph(), on_event=on_event)
    partly = comfy.get("/object_info/ResidentLoadLLM")["ResidentLoadLLM"]["input"]["required"]["model"]
    hub.pause_s = 0
    done = comfy.run_prompt(allowed_graph())
    again = comfy.run_prompt(allowed_graph())
    listed = comfy.get("/object_info/ResidentLoadLLM")["ResidentLoadLLM"]["input"]["required"]["model"]

    assert refused.status == "rejected" and "/runtime download owner/good" in str(refused.error)
    assert stopped.status == "interrupted"
    assert "good" not in str(partly)
    assert done.status == "success" and done.outputs["1"]["text"][0].startswith("good: ")
    assert again.status == "success"
    assert "good" in str(listed)
    assert (comfy.base / "models" / "LLM" / "good" / "model.safetensors").read_bytes() == WEIGHTS
