import random

import pytest

from runtime.request import Sampling

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.generation import logits_process as theirs  # noqa: E402

from runtime.engines.sampling import Sampler  # noqa: E402

VOCAB = 500
PROMPT = (3, 7, 7, 11, 400)


def their_processors(sampling):
    if sampling.repetition_penalty != 1:
        yield theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    yield theirs.TemperatureLogitsWarper(sampling.temperature)
    if sampling.top_k:
        yield theirs.TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1:
        yield theirs.TopPLogitsWarper(sampling.top_p)
    if sampling.min_p:
        yield theirs.MinPLogitsWarper(sampling.min_p)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(top_k=5),
        Sampling(top_k=VOCAB + 1),
        Sampling(top_p=0.5),
        Sampling(top_p=1e-4),
        Sampling(min_p=0.1),
        Sampling(min_p=1.0),
        Sampling(repetition_penalty=1.3),
        Sampling(repetition_penalty=0.8),
        Sampling(temperature=1.4, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.1),
    ],
    ids=repr,
)
def test_draws_equal_those_of_transformers_own_processors(sampling):
    logits = torch.Generator().manual_seed(1)
    sampler = Sampler(sampling, 42, PROMPT, torch.device("cpu"))
    generator = torch.Generator().manual_seed(42)
    seen = list(PROMPT)

    for _ in range(30):
        row = torch.randn(VOCAB, generator=logits) * 3
        scores = row.clone()[None]
        for process in their_processors(sampling):
            scores = process(torch.tensor([seen]), scores)
        wanted = int(torch.multinomial(scores[0].softmax(-1), 1, generator=generator))
        assert sampler.draw(row) == wanted
        seen.append(wanted)


def test_temperature_0_takes_the_largest_after_the_penalty():
    row = torch.zeros(VOCAB)
    row[3], row[5] = 2.0, 1.5

    plain = Sampler(Sampling(temperature=0), 0, PROMPT, torch.device("cpu")).draw(row)
    punished = Sampler(Sampling(temperature=0, repetition_penalty=2), 0, PROMPT, torch.device("cpu")).draw(row)

    assert (plain, punished) == (3, 5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_draws_nothing(bad, temperature):
    row = torch.zeros(VOCAB)
    row[100] = bad

    assert Sampler(Sampling(temperature=temperature), 0, PROMPT, torch.device("cpu")).draw(row) is None


def test_global_random_states_are_neither_read_nor_changed():
    numpy = pytest.importorskip("numpy")
    rows = [torch.randn(VOCAB) for _ in range(5)]

    def drawn():
        sampler = Sampler(Sampling(temperature=1.5), 2**64 - 1, PROMPT, torch.device("cpu"))
        return [sampler.draw(row) for row in rows]

    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    first = drawn()
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    torch.rand(1)

    assert drawn() == first
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-50])
def test_a_temperature_next_to_nothing_is_greedy(temperature):
    sampler = Sampler(Sampling(temperature=temperature), 0, PROMPT, torch.device("cpu"))

    assert sampler.draw(torch.arange(float(VOCAB))) == VOCAB - 1
