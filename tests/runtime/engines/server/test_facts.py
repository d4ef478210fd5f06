from pathlib import Path

import pytest

from runtime.engines.server.facts import ServedModel, ServerFacts, figures, num_busy, read_metrics
from runtime.errors import ModelNotFound

STREAMS = Path(__file__).parents[3] / "streams"


def metrics(name):
    return read_metrics((STREAMS / f"{name}-metrics.txt").read_text())


def test_vllms_figures_are_read_by_whole_name():
    assert figures(metrics("vllm")) == {
        "num_running": 3.0,
        "num_waiting": 2.0,
        "kv_cache_usage": 0.25,
        "prefix_cache_rate": 0.4,
    }
    assert num_busy(metrics("vllm")) == 5.0


def test_llamacpps_figures_count_cached_tokens_among_all():
    assert figures(metrics("llamacpp")) == {"num_running": 1.0, "num_waiting": 0.0, "prefix_cache_rate": 0.25}


@pytest.mark.parametrize("text", ["", "<html>", "{}", "vllm:num_requests_running x", "a" * 10_000])
def test_a_reply_that_is_no_metrics_tells_nothing(text):
    assert figures(read_metrics(text)) == {}
    assert num_busy(read_metrics(text)) is None


def facts(*names):
    models = tuple(ServedModel(name=name) for name in names)
    return ServerFacts(kind="other", version=None, models=models, can_sleep=False)


def test_an_empty_name_is_the_only_model_and_a_tag_may_be_left_out():
    assert facts("a").find("", "x").name == "a"
    assert facts("a:latest", "b").find("a", "x").name == "a:latest"


def test_a_name_that_is_not_served_is_told_with_some_that_are():
    with pytest.raises(ModelNotFound, match=r"x does not serve 'z'. It serves: m0, .*, m7 and 4 more"):
        facts(*(f"m{n}" for n in range(12))).find("z", "x")
    with pytest.raises(ModelNotFound, match="serves several models, and none is chosen"):
        facts("a", "b").find("", "x")


@pytest.mark.parametrize("line", ["a e", "a .", "a NaN", "a 1e999", "a +Inf", "a -"])
def test_a_metric_that_is_no_finite_number_is_left_out(line):
    assert read_metrics(f"{line}\nb 2\n") == {"b": 2.0}
