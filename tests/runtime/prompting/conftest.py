"""Model folders by the kind of their tokenizer; no weights."""

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.prompting.prompter import Prompter
from tests.runtime.prompting.kinds import CHATML, sentencepiece, unigram, write_model

ROOT = Path(__file__).parents[3]


def fetch_qwen3():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/fetch_qwen3_tokenizer.py"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(done.stderr.strip() or "Qwen3's tokenizer could not be fetched")
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def model_folder(request, tmp_path_factory):
    """A model folder by the name of its tokenizer."""
    made = {"unigram": unigram, "sentencepiece": sentencepiece}

    def folder(kind):
        if kind in made:
            config = {"chat_template": CHATML, "eos_token": "</s>", "unk_token": "<unk>"}
            return write_model(tmp_path_factory.mktemp(kind), made[kind](), tokenizer_config=config)
        return fetch_qwen3() if kind == "qwen3" else request.getfixturevalue("model_path")

    return folder


@pytest.fixture(scope="session")
def prompters(model_folder):
    """Get the prompter of a kind of tokenizer; each is loaded once."""
    loaded = {}

    def get(kind):
        if kind not in loaded:
            loaded[kind] = Prompter.load(str(model_folder(kind)))
        return loaded[kind]

    return get
