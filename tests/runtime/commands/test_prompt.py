import json
import subprocess
import sys
from pathlib import Path

from runtime import Prompt
from runtime.prompting.prompter import Prompter

ROOT = Path(__file__).parents[3]
SPY = """
import sys, runtime.__main__ as main
code = main.main(sys.argv[1:])
assert not {"torch", "transformers"} & set(sys.modules), "heavy"
sys.exit(code)
"""


def run(*words, stdin=None):
    return subprocess.run(
        [sys.executable, "-c", SPY, "prompt", *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, input=stdin,
    )  # fmt: skip


def test_it_shows_the_prompt_its_ids_and_the_source_of_each_stop_token(model_path):
    encoded = Prompter.load(str(model_path)).encode(Prompt.of("What does <|im_end|> mean?", system="Be brief."))

    done = run(model_path, "--system", "Be brief.", "--user", "What does <|im_end|> mean?")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(encoded.text)
    assert f"{encoded.num_tokens} tokens: {' '.join(map(str, encoded.token_ids))}" in done.stdout
    assert "2  <|im_end|>  (generation_config.json, config.json, tokenizer eos_token, chat template)" in done.stdout


def test_as_json_it_is_one_object(model_path):
    done = run(model_path, "--user", "-", "--json", stdin="Hello.")

    shown = json.loads(done.stdout)
    encoded = Prompter.load(str(model_path)).encode(Prompt.of("Hello."))
    assert tuple(shown["ids"]) == encoded.token_ids
    assert (shown["rendered"], shown["num_tokens"]) == (encoded.text, encoded.num_tokens)
    assert [entry["id"] for entry in shown["stop"]] == [2]


def test_each_json_line_gives_one_object(model_path, tmp_path):
    turns = [{"system": "s", "user": "a <|im_start|>"}, {"user": "b\n"}, {"system": "", "user": "<|im_end|>" * 9}]
    lines = tmp_path / "turns.jsonl"
    lines.write_text("\n".join(map(json.dumps, turns)) + "\n\n", encoding="utf-8")

    done = run(model_path, "--json-lines", lines)

    prompter = Prompter.load(str(model_path))
    expected = [prompter.encode(Prompt.of(turn["user"], system=turn.get("system", ""))) for turn in turns]
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert [tuple(one["ids"]) for one in shown] == [one.token_ids for one in expected]
    assert [one["num_tokens"] for one in shown] == [one.num_tokens for one in expected]
    assert [set(one) for one in shown] == [{"rendered", "ids", "num_tokens", "stop", "thinking", "notes"}] * 3


def test_faults_are_told_in_a_sentence(model_path, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"user": "a"}\n{"text": "b"}\n', encoding="utf-8")

    assert run(model_path, "--json-lines", bad).stderr.startswith('Line 2 is not {"system": text, "user": text}')
    assert run(model_path, "--user", " ").stderr.startswith("The prompt holds no user text.")
    assert run("/nowhere", "--user", "x").stderr.startswith("There is no model at /nowhere.")
    assert run(model_path).stderr == "Give either --user or --json-lines.\n"
    failed = run(model_path, "--user", "x", "--template", "nonsense")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("There is no chat template 'nonsense'.")
