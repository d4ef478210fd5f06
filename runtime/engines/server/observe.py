"""What a server says of itself: requests, KV cache, latencies, asleep or awake; for the monitor."""

from __future__ import annotations

from ...errors import ResidentError
from . import facts as server
from .answers import Member

PATIENCE_S = 2.0

KV_USAGE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
HITS = ("vllm:prefix_cache_hits", "vllm:prefix_cache_queries")
TTFT = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
TPOT = (
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
    "sglang:inter_token_latency_seconds",
)
QUEUES = (
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
)


def observe(member: Member) -> dict[str, object]:
    """One server's row. Means are over all its requests since it began; None is what it does not tell."""
    row: dict[str, object] = {"title": member.title, "fault": None, "is_asleep": None}
    try:
        if member.facts.can_sleep:
            row["is_asleep"] = server.is_asleep(member.http)
        reply = member.http.get("/metrics", timeout_s=PATIENCE_S)
    except ResidentError as error:
        return {**row, **figures({}), "fault": str(error)}
    return {**row, **figures(server.read_metrics(reply.text) if reply.is_ok else {})}


def figures(metrics: dict[str, float]) -> dict[str, float | None]:
    """The monitor's figures from a server's metrics.

    >>> figures({"vllm:num_requests_running": 2.0})["num_running"]
    2.0
    """
    running, waiting = next((pair for pair in QUEUES if pair[0] in metrics), QUEUES[0])
    hits, queries = (_counter(metrics, name) for name in HITS)
    return {
        "num_running": metrics.get(running),
        "num_waiting": metrics.get(waiting),
        "kv_usage": next((metrics[name] for name in KV_USAGE if name in metrics), None),
        "prefix_hit_rate": hits / queries if hits is not None and queries else None,
        "ttft_s": _mean(metrics, TTFT),
        "tpot_s": _mean(metrics, TPOT),
    }


def _counter(metrics: dict[str, float], name: str) -> float | None:
    return metrics.get(f"{name}_total", metrics.get(name))


def _mean(metrics: dict[str, float], names: tuple[str, ...]) -> float | None:
    for name in names:
        if count := metrics.get(f"{name}_count"):
            return metrics[f"{name}_sum"] / count
    return None
