"""What a server says of itself: requests, KV cache, latencies, asleep or awake; for the monitor."""

from __future__ import annotations

from ...errors import ResidentError
from . import facts as server
from .answers import Member

PATIENCE_S = 2.0

TTFT = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
TPOT = (
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
    "sglang:inter_token_latency_seconds",
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
    told = server.figures(metrics)
    return {
        "num_running": told.get("num_running"),
        "num_waiting": told.get("num_waiting"),
        "kv_usage": told.get("kv_cache_usage"),
        "prefix_hit_rate": told.get("prefix_cache_rate"),
        "ttft_s": _mean(metrics, TTFT),
        "tpot_s": _mean(metrics, TPOT),
    }


def _mean(metrics: dict[str, float], names: tuple[str, ...]) -> float | None:
    for name in names:
        if count := metrics.get(f"{name}_count"):
            return metrics[f"{name}_sum"] / count
    return None
