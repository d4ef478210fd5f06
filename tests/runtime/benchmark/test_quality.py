import math

import pytest

from runtime import ModelSpec, Runtime
from runtime.benchmark.quality import Written, compared, measure_quality, repetition_rate
from runtime.benchmark.table import quality_table

torch = pytest.importorskip("torch")


def written(*texts, logits=None, ids=(0, 1, 2)):
    log_probs = None if logits is None else torch.tensor(logits, dtype=torch.float32).log_softmax(-1)
    return Written(texts=list(texts), held_out=ids, log_probs=log_probs)


EVEN = [[0.0, 0.0, 0.0, 0.0]] * 3
TILTED = [[math.log(3), 0.0, 0.0, 0.0]] * 3


def test_agreement_counts_up_to_where_two_texts_part():
    row = compared(written("a cat", "a dog"), written("a cat", "a fox"))

    assert row["agreement"] == (5 + 2) / 10
    assert row["num_equal_texts"] == 1


def test_a_model_agrees_with_itself_in_all():
    one = written("a cat sat", logits=TILTED)

    row = compared(one, one)

    assert (row["agreement"], row["kl_mean"], row["kl_max"], row["top1_agreement"]) == (1.0, 0.0, 0.0, 1.0)


def test_perplexity_of_a_model_that_knows_nothing_is_the_size_of_its_vocabulary():
    assert compared(written("x"), written("x", logits=EVEN))["perplexity"] == pytest.approx(4.0)


def test_divergence_is_that_of_two_distributions_known_by_hand():
    row = compared(written("x", logits=EVEN), written("x", logits=TILTED))

    by_hand = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.25 / (1 / 6))
    assert row["kl_mean"] == pytest.approx(by_hand, rel=1e-5)


def test_rows_that_only_pad_the_vocabulary_do_not_hinder_a_comparison():
    padded = [[*row, -1e9] for row in TILTED]

    assert compared(written("x", logits=TILTED), written("x", logits=padded))["kl_mean"] == pytest.approx(0, abs=1e-6)


def test_other_tokens_cannot_be_compared():
    row = compared(written("x", logits=EVEN), written("x", logits=EVEN, ids=(0, 2, 1)))

    assert (row["kl_mean"], row["top1_agreement"]) == (None, None)
    assert row["perplexity"] is not None


@pytest.mark.parametrize(("text", "rate"), [("one two three four five", 0.0), ("a " * 103, 0.99), ("too short", None)])
def test_repetition_is_the_share_of_words_that_came_before(text, rate):
    assert repetition_rate([text]) == (rate if rate is None else pytest.approx(rate))


def test_models_without_logits_are_compared_by_their_texts_and_a_failing_one_says_why():
    options = (("reply", "You said: {prompt}"),)
    specs = [
        ModelSpec(model="a", engine="scripted", options=options, context_len=16000),
        ModelSpec(model="b", engine="scripted", options=options, context_len=16000, dtype="other"),
        ModelSpec(model="c", engine="scripted", options=(*options, ("fail_at", 1)), context_len=16000),
    ]
    measuring = measure_quality(specs, Runtime(), output_tokens=32)
    while True:
        try:
            next(measuring)
        except StopIteration as end:
            rows = end.value
            break

    assert [row["agreement"] for row in rows] == [1.0, 1.0, None]
    assert (rows[0]["num_prompts"], rows[0]["perplexity"]) == (25, None)
    assert rows[2]["error"] == "step 1 failed by script."
    assert "step 1 failed by script." in quality_table(rows)
