import pytest

from runtime.prompting import presets

GOOD = "---\ntitle: Mine: too\nclean: quotes\nuser: Idea: {text}\\n\n---\nWrite a haiku.\n"


@pytest.mark.parametrize("preset_id", presets.find())
def test_each_bundled_preset_can_be_read(preset_id):
    preset = presets.load(preset_id)

    assert preset.title and preset.about.endswith(".") and len(preset.system) > 200
    assert preset.clean


def test_the_ids_stay_what_they_are():
    """Workflows hold them: add to this list, never change or remove one."""
    assert list(presets.find()) == [
        "camera-angles",
        "edit-instruction",
        "flux",
        "image-to-video",
        "negative-prompt",
        "qwen-image",
        "rewrite",
        "sdxl-prose",
        "sdxl-tags",
        "translate-english",
        "variations",
        "views",
        "wan-video",
    ]


def test_a_users_preset_stands_beside_the_bundled_ones(tmp_path):
    (tmp_path / "flux.md").write_text(GOOD, encoding="utf-8")

    mine = presets.load("my/flux", [tmp_path])

    assert (mine.title, mine.system, mine.clean) == ("Mine: too", "Write a haiku.", ("quotes",))
    assert mine.user_text("a {text} fox") == "Idea: a {text} fox\n"
    assert mine.system_text("In German.") == "Write a haiku.\n\nIn German."
    assert presets.load("flux", [tmp_path]).title == "FLUX"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Write.", "must begin with a head between two lines of ---"),
        ("---\ntitle: x\nWrite.", "must begin with a head"),
        ("---\ncolour: red\n---\nWrite.", "'colour: red' in line 2; its head holds title, about, clean, user"),
        ("---\nclean: sparkle\n---\nWrite.", "unknown cleaning rule 'sparkle'"),
        ("---\nuser: fixed\n---\nWrite.", "without {text}, so what the user writes would be lost"),
    ],
)
def test_a_faulty_preset_says_what_is_wrong(text, words, tmp_path):
    (tmp_path / "bad.md").write_text(text, encoding="utf-8")

    with pytest.raises(ValueError, match=f"The preset my/bad .*{words}"):
        presets.load("my/bad", [tmp_path])


def test_an_unknown_preset_lists_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"no preset 'x'. Presets are: camera-angles"):
        presets.load("x", [tmp_path])


@pytest.mark.parametrize("spoil", [lambda file: file.symlink_to("gone"), lambda file: file.mkdir()])
def test_a_preset_that_cannot_be_read_is_told(spoil, tmp_path):
    spoil(tmp_path / "broken.md")

    with pytest.raises(ValueError, match=r"^The preset my/broken cannot be read: "):
        presets.load("my/broken", [tmp_path])
