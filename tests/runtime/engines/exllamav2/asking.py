"""Requests to an engine, and what of their steps the tests look at."""

from runtime import GREEDY, Prompt
from runtime.engines.base import DecodeStep, Work


def work(engine, ids, max_tokens=16, *, sampling=GREEDY, seed=0):
    encoded = engine.encode(Prompt.of(" ".join(map(str, ids))))
    return Work(encoded=encoded, sampling=sampling, max_tokens=max_tokens, seed=seed)


def run(engine, *batch, commands=None):
    """Everything that the engine yields, by request. commands: (index, number of the decode step) -> command."""
    steps = engine.generate(batch)
    out = {index: [] for index in range(len(batch))}
    command = None
    while True:
        try:
            index, step = steps.send(command)
        except StopIteration:
            return out
        out[index].append(step)
        num_decoded = sum(isinstance(one, DecodeStep) for one in out[index])
        is_new = isinstance(step, DecodeStep)
        command = (commands or {}).get((index, num_decoded)) if is_new else None


def ids_of(steps):
    return [one for step in steps if isinstance(step, DecodeStep) for one in step.token_ids]


def text_of(steps):
    return "".join(step.text for step in steps if isinstance(step, DecodeStep))


def free_pages(engine):
    generator = engine._generator
    if hasattr(generator, "num_free_pages"):
        return generator.num_free_pages
    return len(generator.unreferenced_pages)


PROMPT = [5, 17, 42, 7, 99]


LONG = [(place * 13) % 150 for place in range(700)]
