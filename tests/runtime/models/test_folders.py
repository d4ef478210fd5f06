import pytest

from runtime.models.folders import model_folders


@pytest.fixture
def comfyui(tmp_path, monkeypatch):
    """A ComfyUI folder that COMFYUI_PATH names, with an LLM folder."""
    (tmp_path / "models" / "LLM").mkdir(parents=True)
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    monkeypatch.delenv("RESIDENT_MODELS", raising=False)
    return tmp_path


def paths():
    return [folder.path for folder in model_folders()]


def test_models_are_folders_with_config_and_weights_and_gguf_files(comfyui):
    root = comfyui / "models" / "LLM"
    for name in ("whole", "maker/whole", "no-weights"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").touch()
    (root / "whole" / "model.safetensors").touch()
    (root / "maker" / "whole" / "model-00001-of-00002.safetensors").touch()
    (root / "one.gguf").touch()

    assert model_folders()[0].models == ("maker/whole", "one.gguf", "whole")


def test_a_folder_that_is_named_but_not_there_is_told(comfyui, monkeypatch):
    monkeypatch.setenv("RESIDENT_MODELS", str(comfyui / "gone"))

    folder = model_folders()[1]

    assert (folder.path, folder.exists, folder.models) == (str(comfyui / "gone"), False, ())


def test_the_extra_model_paths_of_comfyui_count_in_both_spellings(comfyui):
    pytest.importorskip("yaml")
    (comfyui / "extra_model_paths.yaml").write_text(
        "mine:\n  base_path: /data\n  LLM: |\n    big\n    small\n  checkpoints: sd\nother:\n  llm: rel/llm\n"
    )

    assert paths()[:4] == [str(comfyui / "models" / "LLM"), "/data/big", "/data/small", str(comfyui / "rel" / "llm")]


def test_the_lower_case_folder_counts_too(comfyui):
    (comfyui / "models" / "llm").mkdir(exist_ok=True)

    assert paths()[0] == str(comfyui / "models" / "LLM")
    assert str(comfyui / "models" / "llm") in paths()


@pytest.mark.parametrize(
    "text", ["comfyui:\n", "a: 5\n", "[1, 2]\n", "", "a: {LLM: [x, y]}\n", "a: {LLM: 5, base_path: 7}\n"], ids=repr
)
def test_sections_of_the_extra_paths_that_name_no_folder_are_passed_over(comfyui, text):
    before = paths()
    (comfyui / "extra_model_paths.yaml").write_text(text)

    assert paths() == before


@pytest.mark.parametrize("data", [b"{{{", b"\xff\xfe\xff"], ids=repr)
def test_extra_paths_that_cannot_be_read_are_told_and_left_out(comfyui, data, caplog):
    before = paths()
    (comfyui / "extra_model_paths.yaml").write_bytes(data)

    assert paths() == before
    assert "extra_model_paths.yaml cannot be read" in caplog.text
