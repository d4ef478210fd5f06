import os
from pathlib import Path

import pytest

from runtime import Prompt
from runtime.prompting.prompter import Prompter

MODEL = Path(os.environ.get("RESIDENT_TEST_MODEL") or ".build/models/SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def prompter():
    if not MODEL.is_dir():
        pytest.skip(f"{MODEL} is not there; make model brings it")
    return Prompter.load(str(MODEL))


def test_ids_come_back_as_the_text_without_control_tokens(prompter):
    encoded = prompter.encode(Prompt.of("hello wörld 你好 🎨", system="Be brief."))
    detokenizer = prompter.detokenizer()

    text = "".join(detokenizer.push([one]) for one in encoded.token_ids) + detokenizer.flush()

    assert text == "system\nBe brief.\nuser\nhello wörld 你好 🎨\nassistant\n"
    assert prompter.vocab_size == 49152
