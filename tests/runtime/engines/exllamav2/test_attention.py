"""Which attention runs, and when it is believed."""

from types import SimpleNamespace

import pytest

from runtime.engines import exllamav2_attention
from runtime.errors import EngineUnavailable, GenerationFailed
from tests.runtime.engines import exllamav2_cpu as cpu
from tests.runtime.engines.exllamav2.asking import LONG, PROMPT, ids_of, run, work


def test_without_flash_attn_one_request_runs_at_a_time_and_the_report_says_why(open_engine):
    engine = open_engine(attention="eager")

    out = run(engine, work(engine, PROMPT), work(engine, LONG))

    assert (engine.info.attention, engine.info.details["is_paged"]) == ("eager", False)
    assert engine.info.details["why_not_flash_attention"] == "it was asked not to"
    assert engine._parts.config.no_sdpa
    assert ids_of(out[0]) == cpu.manual(PROMPT, 16)
    assert ids_of(out[1]) == cpu.manual(LONG, 16)
    [warm] = run(engine, work(engine, [*LONG[:300], 5])).values()
    assert warm[-1].details["num_cached_tokens"] >= 256
    assert ids_of(warm) == cpu.manual([*LONG[:300], 5], 16)


def test_attention_that_sees_the_future_is_refused_before_any_text(open_engine, monkeypatch):
    original = cpu.Model.__init__

    def blind(self, config):
        original(self, config)
        self.is_causal = False

    monkeypatch.setattr(cpu.Model, "__init__", blind)

    with pytest.raises(GenerationFailed, match="not causal: changing token 40 moved the logits before it"):
        open_engine()


def test_flash_attention_is_believed_only_after_its_numbers():
    probe = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "device": "cpu"}

    def blind(**call):
        return cpu.paged_attention(**call, is_causal=False)

    def dead(**_):
        raise RuntimeError("no kernel image is available")

    assert exllamav2_attention.probe_flash(cpu.paged_attention, **probe) is None
    assert "off exact attention" in exllamav2_attention.probe_flash(blind, **probe)
    assert "no kernel image" in exllamav2_attention.probe_flash(dead, **probe)


def test_flash_attention_that_was_asked_for_and_is_broken_is_an_error():
    sdk = SimpleNamespace(flash_fault="flash-attn is broken (ImportError: undefined symbol)")

    with pytest.raises(EngineUnavailable, match="undefined symbol"):
        exllamav2_attention.choose(sdk, "flash_attention_2", num_heads=4, num_kv_heads=2, head_dim=64, device="cpu")
