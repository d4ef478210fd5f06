import types

import pytest

from runtime.engines.server.observe import figures, observe
from runtime.errors import ServerError

METRICS = """
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:prefix_cache_queries_total{engine="0"} 1000.0
vllm:prefix_cache_hits_total{engine="0"} 400.0
vllm:time_to_first_token_seconds_count{engine="0"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0"} 2.0
vllm:request_time_per_output_token_seconds_count{engine="0"} 10.0
vllm:request_time_per_output_token_seconds_sum{engine="0"} 0.5
"""


class Http:
    def __init__(self, text=METRICS, status=200, error=None):
        self._text, self._status, self._error = text, status, error

    def get(self, path, *, timeout_s=0):
        if self._error:
            raise self._error
        if path == "/is_sleeping":
            return types.SimpleNamespace(is_ok=True, body={"is_sleeping": True})
        return types.SimpleNamespace(is_ok=self._status == 200, text=self._text)


def member(**told):
    facts = types.SimpleNamespace(can_sleep=True)
    return types.SimpleNamespace(title="vLLM at 127.0.0.1:8000", facts=facts, http=Http(**told))


def test_a_vllm_server_tells_requests_cache_latencies_and_that_it_sleeps():
    assert observe(member()) == {
        "title": "vLLM at 127.0.0.1:8000",
        "fault": None,
        "is_asleep": True,
        "num_running": 2.0,
        "num_waiting": 1.0,
        "kv_usage": 0.25,
        "prefix_hit_rate": 0.4,
        "ttft_s": 0.5,
        "tpot_s": 0.05,
    }


@pytest.mark.parametrize("told", [{"status": 404, "text": "not found"}, {"text": ""}])
def test_a_server_without_metrics_is_unknown_and_not_faulty(told):
    row = observe(member(**told))

    assert row["fault"] is None
    assert {row[name] for name in figures({})} == {None}


def test_a_server_that_is_gone_is_told_with_its_sentence():
    row = observe(member(error=ServerError("The server cannot be reached.")))

    assert (row["fault"], row["num_running"]) == ("The server cannot be reached.", None)
