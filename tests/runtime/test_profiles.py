import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import profiles
from runtime.errors import ServerError
from runtime.profiles import Profile
from tests.servers.scripted_server import ScriptedServer

ROOT = Path(__file__).parents[2]
KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    file = tmp_path / "deep" / "profiles.json"
    monkeypatch.setenv(profiles.PATH_VARIABLE, str(file))
    return file


def command(*words, stdin=None):
    return subprocess.run(
        [sys.executable, "-m", "runtime", "profiles", *words], cwd=ROOT, input=stdin, capture_output=True, text=True
    )


def test_what_is_written_is_read_again_and_others_stay(path):
    first = Profile(name="a", base_url="https://a.example/v1", key=KEY, headers=(("X-Team", "art"),), models=("m",))
    second = Profile(name="b", base_url="http://127.0.0.1:8000", pool=("a",), max_concurrent=3)

    profiles.write(first)
    profiles.write(second)

    assert profiles.find("a") == first
    assert profiles.find("b") == second
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_file_holds_only_what_was_said(path):
    profiles.write(Profile(name="a", base_url="http://127.0.0.1:8000"))

    assert json.loads(path.read_text()) == {"profiles": {"a": {"base_url": "http://127.0.0.1:8000"}}}


def test_without_a_file_there_are_servers_of_this_machine():
    assert all(profile.is_loopback and profile.key is None for profile in profiles.read().values())
    assert profiles.find("localhost:4321").root_url == "http://127.0.0.1:4321"


@pytest.mark.parametrize("name", ["nope", "evil.example:80", "localhost:0", "localhost:99999", "localhost", ""])
def test_an_address_that_is_no_profile_is_refused(name):
    with pytest.raises(ServerError, match="There is no server profile"):
        profiles.find(name)


@pytest.mark.parametrize(
    "fields",
    [
        {"base_url": "ftp://x"},
        {"base_url": "http://user:pass@x"},
        {"base_url": "http://x/?key=1"},
        {"base_url": "x:8000"},
        {"name": "a/b"},
        {"name": ""},
        {"key": "k", "key_env": "K"},
        {"max_concurrent": 0},
        {"first_token_s": 0},
        {"connect_s": float("nan")},
        {"between_tokens_s": float("inf")},
        {"gpu_bytes": -1},
        {"headers": (("Host", "x"),)},
        {"headers": (("X", "a\r\nHost: b"),)},
    ],
)
def test_a_profile_that_could_not_work_or_do_harm_is_refused(fields):
    with pytest.raises(ServerError):
        Profile(**{"name": "a", "base_url": "http://x", **fields})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "5",
        '{"profiles": 5}',
        '{"profiles": []}',
        '{"profiles": {"a": 5}}',
        '{"profiles": {"a": {}}}',
        "[" * 9999,
    ],
)
def test_a_damaged_file_is_told_with_its_path(path, text):
    path.parent.mkdir()
    path.write_text(text)

    with pytest.raises(ServerError, match=rf"{path} cannot be read: .* Mend it") as caught:
        profiles.read()

    assert "Error" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"base_url": 5}, "base_url must be a text, and is 5."),
        ({"models": "m"}, "models must be a list of texts, and is 'm'."),
        ({"models": ["m", 5]}, "models must be a list of texts, and is ['m', 5]."),
        ({"pool": {"a": 1}}, "pool must be a list of texts, and is {'a': 1}."),
        ({"max_concurrent": "3"}, "max_concurrent must be a whole number, and is '3'."),
        ({"max_concurrent": True}, "max_concurrent must be a whole number, and is True."),
        ({"gpu_bytes": "8 GB"}, "gpu_bytes must be a whole number, and is '8 GB'."),
        ({"connect_s": "10"}, "connect_s must be a number, and is '10'."),
        ({"proxy_from_env": "no"}, "proxy_from_env must be true or false, and is 'no'."),
        ({"tokenizer": ["a"]}, "tokenizer must be a text, and is ['a']."),
        ({"key_env": 5}, "key_env must be a text, and is 5."),
        ({"headers": ["X"]}, "headers must be an object of texts."),
        ({"headers": {"X": 5}}, "headers must be an object of texts."),
        ({"key": ["secret"]}, "key must be a text."),
    ],
)
def test_an_entry_of_another_kind_is_named_with_what_it_must_be_and_no_secret(path, entry, words):
    path.parent.mkdir()
    path.write_text(json.dumps({"profiles": {"a": {"base_url": "http://x", **entry}}}))

    with pytest.raises(ServerError) as caught:
        profiles.read()

    assert f"{path} cannot be read: Profile 'a': {words}" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_entry_that_is_null_is_left_out(path):
    path.parent.mkdir()
    path.write_text('{"profiles": {"a": {"base_url": "http://x", "models": null, "key": null}}}')

    assert profiles.find("a") == Profile(name="a", base_url="http://x")


def test_an_unknown_entry_is_named(path):
    path.parent.mkdir()
    path.write_text('{"profiles": {"a": {"base_url": "http://x", "api_key": "k"}}}')

    with pytest.raises(ServerError, match="unknown entry 'api_key'"):
        profiles.read()


def test_a_profile_never_shows_its_key():
    assert KEY not in repr(Profile(name="a", base_url="http://x", key=KEY, headers=(("X-Key", KEY),)))


def test_the_command_adds_lists_and_tests_without_showing_a_key(path):
    with ScriptedServer() as server:
        added = command("add", "box", "--url", server.url, "--ask-key", "--model", "tiny", stdin=f"{KEY}\n")
        listed = command("list")
        tested = command("test", "box")

    assert (added.returncode, listed.returncode, tested.returncode) == (0, 0, 0)
    assert profiles.find("box").key == KEY
    assert KEY not in added.stdout + added.stderr + listed.stdout + listed.stderr + tested.stdout + tested.stderr
    assert "stored key" in listed.stdout
    assert "model tiny, context of 64" in tested.stdout
    assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"


def test_what_the_command_is_told_of_prompts_is_in_the_profile(path, tmp_path):
    done = command("add", "box", "--url", "http://box:1", "--tokenizer", str(tmp_path), "--uses-chat")

    assert done.returncode == 0, done.stderr
    found = profiles.find("box")
    assert (found.tokenizer, found.uses_chat) == (str(tmp_path), True)


def test_testing_a_server_that_is_down_is_one_sentence(path):
    profiles.write(Profile(name="box", base_url="http://127.0.0.1:9"))

    done = command("test", "box")

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "cannot be reached" in done.stderr


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text('{"profiles": {}}', encoding="utf-16"),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path.name),
    ],
    ids=["UTF-16", "folder", "link in a circle"],
)
def test_a_file_that_cannot_be_opened_is_told_with_its_path(spoil, path):
    path.parent.mkdir()
    spoil(path)

    with pytest.raises(ServerError, match=rf"^The profile file {path} cannot be read"):
        profiles.read()


def test_a_file_from_an_editor_that_marks_its_encoding_is_read(path):
    path.parent.mkdir()
    path.write_text('{"profiles": {"box": {"base_url": "http://box:1"}}}', encoding="utf-8-sig")

    assert profiles.find("box").base_url == "http://box:1"


def test_a_profile_file_that_never_ends_is_not_read():
    with pytest.raises(ServerError, match="it is no plain file"):
        profiles.read(Path("/dev/zero"))
