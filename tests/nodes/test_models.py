import os

import pytest


@pytest.fixture
def models(pack):
    return pack("nodes.models")


def make(root, *files):
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return str(root)


def test_folders_with_a_config_or_weights_and_gguf_files_are_models(models, tmp_path):
    root = make(
        tmp_path,
        *("owner/model/config.json", "owner/model/model.safetensors", "weights-only/model.safetensors"),
        *("one.gguf", "quants/two.Q4_K_M.gguf", "quants/mmproj-two.gguf", "quants/readme.md"),
        *("big/big-00001-of-00002.gguf", "big/big-00002-of-00002.gguf", ".hidden/config.json", "empty/notes.txt"),
    )

    found = models.scan([root])

    assert list(found.models) == [
        *("big/big-00001-of-00002.gguf", "one.gguf", "owner/model", "quants/two.Q4_K_M.gguf", "weights-only"),
    ]
    assert {"owner", "empty", "quants"} <= found.folders


def test_every_root_counts_and_the_earlier_one_wins(models, tmp_path):
    first = make(tmp_path / "a", "same/config.json", "only-a/config.json")
    second = make(tmp_path / "b", "same/config.json", "only-b/config.json")

    found = models.scan([first, second])

    assert set(found.models) == {"same", "only-a", "only-b"}
    assert found.models["same"].startswith(first)


def test_a_model_that_is_added_deep_down_appears_without_a_restart(models, tmp_path):
    root = make(tmp_path, "owner/one/config.json")
    before = models.listing([root])

    make(tmp_path, "owner/two/config.json")
    after = models.listing([root])

    assert list(before.models) == ["owner/one"]
    assert list(after.models) == ["owner/one", "owner/two"]
    assert models.listing([root]) is after


def test_a_missing_root_holds_nothing(models, tmp_path):
    assert models.scan([str(tmp_path / "nowhere")]).models == {}


def test_a_link_that_leads_in_a_circle_ends(models, tmp_path):
    root = make(tmp_path, "model/config.json")
    os.symlink(root, tmp_path / "loop")

    assert "model" in models.scan([root]).models


def test_the_revision_changes_with_the_files_and_only_with_them(models, tmp_path):
    folder = make(tmp_path / "model", "config.json", "model.safetensors", "picture.png")
    first = models.revision(folder)

    (tmp_path / "model" / "picture.png").write_bytes(b"other")
    assert models.revision(folder) == first

    (tmp_path / "model" / "model.safetensors").write_bytes(b"longer")
    assert models.revision(folder) != first


@pytest.fixture
def load(pack, stubs, tmp_path, monkeypatch):
    paths = stubs["folder_paths"]
    monkeypatch.setattr(paths, "models_dir", str(tmp_path))
    monkeypatch.setattr(paths, "folder_names_and_paths", {"LLM": ([str(tmp_path / "LLM")], set())})
    return pack("nodes.load")


@pytest.fixture
def menu(load, pack):
    return pack("nodes.menu")


@pytest.mark.parametrize("name", ["/etc", "../outside", "good/../../outside", "C:\\models", "good\0", "", "."])
def test_a_name_that_is_not_in_the_menu_reaches_no_path(load, tmp_path, name):
    make(tmp_path, "LLM/good/config.json", "outside/config.json")

    answer = load.LoadLLM.validate_inputs(name)

    assert isinstance(answer, str)
    assert "good" in answer


def test_the_menu_and_the_path_follow_links_that_the_user_made(menu, tmp_path):
    make(tmp_path, "disk/model/config.json", "LLM/good/config.json")
    os.symlink(tmp_path / "disk" / "model", tmp_path / "LLM" / "linked")

    assert menu.path_of("linked") == str(tmp_path / "disk" / "model")


def test_both_spellings_of_the_folder_are_searched(menu, tmp_path):
    make(tmp_path, "LLM/one/config.json", "llm/two/config.json")

    assert menu.path_of("one") and menu.path_of("two")


@pytest.mark.parametrize(
    ("files", "name", "sentence"),
    [
        (
            [],
            "(no model found)",
            r"There is no language model in .*LLM\. Put a model folder.*/runtime download \S+ --into .*LLM$",
        ),
        (["LLM/good/config.json", "LLM/bare/x.txt"], "bare", r"'bare' holds no model.*There are: good\."),
        (["LLM/good/config.json"], "gone", r"'gone' is not in .*LLM\. There are: good\. Pick"),
    ],
)
def test_an_unknown_model_gets_a_sentence_that_says_what_is_there(menu, tmp_path, files, name, sentence):
    make(tmp_path, *files)

    with pytest.raises(menu.ModelNotFound, match=sentence):
        menu.path_of(name)


def test_a_wired_model_name_is_not_refused_before_it_is_known(load):
    assert load.LoadLLM.validate_inputs(None) is True


def test_a_link_that_leads_in_a_circle_hides_no_other_model(models, tmp_path):
    root = make(tmp_path, "one/config.json")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "self").symlink_to(tmp_path)

    assert {"one", "self/one"} <= set(models.scan([root]).models)


def test_a_link_to_a_file_that_is_gone_still_gives_a_mark(models, tmp_path):
    root = make(tmp_path, "one/config.json")
    before = models.revision(f"{root}/one")
    (tmp_path / "one" / "model.safetensors").symlink_to("nowhere")

    assert models.revision(f"{root}/one") != before


def test_a_name_that_is_no_unicode_gives_a_mark(models, tmp_path):
    root = make(tmp_path, os.fsdecode(b"caf\xe9.gguf"))

    [path] = models.scan([root]).models.values()

    assert models.revision(path)
