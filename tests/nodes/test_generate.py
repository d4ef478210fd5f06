import pytest


@pytest.fixture
def generate(pack):
    return pack("nodes.generate")


@pytest.fixture
def items(pack, generate):
    """Items from lists; what is not given is a list of one, as a widget gives it."""
    runtime = pack("runtime")

    def make(prompts=("a",), seeds=(0,), models=("m",), max_tokens=(0,), budgets=(0,), cut=("error",)):
        specs = [runtime.ModelSpec(model=model) for model in models]
        return generate.items_of(specs, prompts, seeds, max_tokens, [runtime.Sampling()], budgets, cut)

    return make


def test_a_single_seed_counts_up_and_wraps_at_its_end(items):
    assert [item.request.seed for item in items(["a", "b", "c"], [2**64 - 2])] == [2**64 - 2, 2**64 - 1, 0]


def test_item_i_uses_the_ith_seed_and_the_last_repeats(items):
    assert [item.request.seed for item in items(["a", "b", "c"], [5, 9])] == [5, 9, 9]


def test_one_prompt_with_a_list_of_seeds_is_a_batch(items):
    made = items(["a"], [1, 2, 3])

    assert [item.request.prompt.messages[-1].text for item in made] == ["a"] * 3
    assert [item.request.seed for item in made] == [1, 2, 3]


def test_zero_is_no_limit(items):
    [item] = items()

    assert item.request.max_tokens is None
    assert item.request.thinking_budget is None


def test_no_prompts_are_no_items(items):
    assert items([]) == []


def test_an_empty_list_where_a_value_belongs_is_named(items):
    with pytest.raises(ValueError, match=r"^seed, max_tokens is wired to a list without items"):
        items(["a", "b"], seeds=[], max_tokens=[])


def test_a_bad_value_names_its_item(items):
    with pytest.raises(ValueError, match=r"^Item 2 of 3: The prompt holds no user text"):
        items(["a", " ", "c"])
    with pytest.raises(ValueError, match=r"^The prompt holds no user text"):
        items([" "])


class Fake:
    """A runtime whose models answer with their name and the prompt, and fail where they are told to."""

    def __init__(self, pack, failing=()):
        self.events, self.errors = pack("runtime.events"), pack("runtime.errors")
        self.base, self.telemetry = pack("runtime.engines.base"), pack("runtime.telemetry")
        self.failing, self.batches, self.num_closed = failing, [], 0

    def generate(self, spec, requests):
        self.batches.append((spec.model, len(requests)))
        try:
            if spec.model in self.failing:
                raise self.errors.ModelLoadFailed(f"{spec.model} is damaged.")
            for index, request in enumerate(requests):
                text = f"{spec.model}:{request.prompt.messages[-1].text}"
                yield self.events.TextDelta(index=index, text=text, channel="answer", num_tokens=1)
                yield self.events.Finished(
                    index=index,
                    finish=self.events.Finish(reason="stop", by="token"),
                    raw_text=text,
                    is_cut_thinking=False,
                    num_prompt_tokens=1,
                    num_cached_tokens=0,
                    num_output_tokens=1,
                    timings=self.telemetry.Timings(0.0),
                )
            info = self.base.EngineInfo(
                engine="fake",
                model=spec.model,
                context_len=9,
                device="cpu",
                dtype="-",
                attention="-",
                kv_cache="-",
            )
            return info, self.telemetry.Bytes()
        finally:
            self.num_closed += 1


@pytest.fixture
def answer(pack, generate, monkeypatch):
    def make(items, failing=()):
        fake = Fake(pack, failing)
        monkeypatch.setattr(generate.host, "runtime", lambda: fake)
        live = pack("nodes.live").Live(num_items=len(items))
        return fake, lambda: generate.answer(items, live)

    return make


def test_neighbours_with_one_model_are_one_batch_and_the_order_stays(items, answer):
    fake, run = answer(items(["a", "b", "c", "d"], models=["m", "m", "n", "m"]))

    assert [result.text for result in run()] == ["m:a", "m:b", "n:c", "m:d"]
    assert fake.batches == [("m", 2), ("n", 1), ("m", 1)]


def test_a_model_that_cannot_be_loaded_leaves_the_others_alone_and_names_its_item(pack, items, answer):
    fake, run = answer(items(["a", "b", "c"], models=["m", "bad", "n"]), failing=["bad"])

    with pytest.raises(pack("runtime.errors").ModelLoadFailed, match=r"^Item 2 of 3 failed: bad is damaged\. \(2 of 3"):
        run()
    assert len(fake.batches) == 3


def test_an_interrupt_is_raised_between_two_events_and_closes_the_stream(stubs, items, answer):
    fake, run = answer(items(["a", "b"]))
    stubs["comfy"].model_management.is_interrupted = True

    with pytest.raises(BaseException, match=r"^$") as raised:
        run()
    assert type(raised.value).__name__ == "Interrupted"
    assert fake.num_closed == 1


def test_out_of_memory_that_began_in_torch_goes_back_as_torchs_own_with_our_sentence(pack, stubs):
    host, ours = pack("nodes.host"), pack("runtime.errors").OutOfMemory
    theirs = stubs["comfy"].model_management.OOM_EXCEPTION

    with pytest.raises(theirs, match=r"^12 GB do not fit\. Use a smaller model\.$"), host.translated_errors():
        try:
            raise theirs("CUDA out of memory")
        except theirs as error:
            raise ours("12 GB do not fit. Use a smaller model.") from error


def test_out_of_memory_that_was_computed_beforehand_stays_ours(pack):
    host, ours = pack("nodes.host"), pack("runtime.errors").OutOfMemory

    with pytest.raises(ours, match="do not fit"), host.translated_errors():
        raise ours("12 GB do not fit.")


def test_nothing_is_sent_without_a_client_id(pack, stubs):
    events, host = pack("runtime.events"), pack("nodes.host")

    host.live_text(hidden=None, num_items=1).take(events.LoadProgress(done=1, total=2))

    stubs["server"].PromptServer.instance.send_sync.assert_not_called()


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ({"prompts": [None]}, "prompt is nothing. Wire in an LLM Prompt or a text."),
        ({"prompts": ["a", 5]}, "Item 2 of prompt is a value of the kind int."),
    ],
)
def test_a_value_that_no_socket_type_could_stop_is_told(lists, words, items):
    with pytest.raises(ValueError, match=words):
        items(**lists)


def test_a_model_that_is_nothing_is_told(pack, generate):
    with pytest.raises(ValueError, match=r"llm is nothing\. Wire in Load LLM"):
        generate.items_of([None], ["a"], [0], [0], [pack("runtime").Sampling()], [0], ["error"])
