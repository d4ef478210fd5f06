import sys
import types

import pytest

from runtime.patches import Patch, Patches, registry


class Fault:
    """A value that is wrong until it is patched, and what happened to it."""

    def __init__(self, value="wrong", fixed="right"):
        self.value, self.fixed, self.done = value, fixed, []

    def patch(self, versions=("1.0", "1.9")):
        return Patch(
            id="fix",
            package="package",
            versions=versions,
            cures="it was wrong",
            is_faulty=lambda: self.value != "right",
            apply=self.apply,
        )

    def apply(self):
        before, self.value = self.value, self.fixed
        self.done.append("apply")

        def undo():
            self.value = before
            self.done.append("undo")

        return undo


def patches(fault, version="1.2", **fields):
    return Patches([fault.patch(**fields)], version_of=lambda package: version)


def test_a_patch_lives_from_the_first_hold_to_the_last():
    fault = Fault()
    them = patches(fault)

    first, second = them.hold("fix"), them.hold("fix")
    first.close()
    first.close()
    while_held, state = fault.value, second.state
    second.close()

    assert while_held == "right"
    assert str(state) == "fix: applied (it was wrong)"
    assert (fault.value, fault.done) == ("wrong", ["apply", "undo"])
    assert them.states()[0].status == "not applied"


def test_a_patch_can_be_applied_again_after_it_was_reverted():
    fault = Fault()
    them = patches(fault)
    them.hold("fix").close()

    assert them.hold("fix").state.status == "applied"


def test_where_the_probe_finds_no_fault_nothing_is_done():
    fault = Fault(value="right")

    state = patches(fault).hold("fix").state

    assert (state.status, state.why, fault.done) == ("not needed", "the probe finds no fault", [])


@pytest.mark.parametrize("version", ["0.9.9", "1.10", "2.0+cu121"])
def test_outside_its_versions_it_is_not_even_probed(version):
    state = patches(Fault(), version).hold("fix").state

    assert (state.status, state.why) == ("not needed", f"package is {version}; it is for 1.0 to 1.9")


def test_a_patch_that_does_not_cure_is_reverted_and_refused():
    fault = Fault(fixed="still wrong")

    state = patches(fault).hold("fix").state

    assert (state.status, state.why) == ("refused", "the fault is still there after it")
    assert fault.value == "wrong"


def test_a_probe_that_raises_refuses_and_says_what_it_raised():
    patch = Patch(
        id="fix", package="p", versions=("0", "9"), cures="-", is_faulty=lambda: 1 / 0, apply=lambda: lambda: None
    )

    state = Patches([patch], version_of=lambda package: "1").hold("fix").state

    assert (state.status, state.why) == ("refused", "ZeroDivisionError: division by zero")


def test_the_real_table_lists_every_patch_without_the_package():
    [state] = registry().states()

    assert state.id == "exllamav2-causal-sdpa"
    assert state.status == "not needed"


@pytest.fixture
def exllamav2(monkeypatch):
    """A stand-in of exllamav2 with the same fault: every causal layer gets the block-diagonal mask."""
    torch = pytest.importorskip("torch")

    class ExLlamaV2Attention:
        def _attn_torch(self, batch_size, q_len, q, k, v, attn_params, cfg, causal=True):
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            if self.layer_idx in attn_params.block_diag_layers or causal:
                mask = attn_params.get_block_diag_mask(q.device)
            else:
                mask = None
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=self.scaling)
            return out.transpose(1, 2).reshape(batch_size, q_len, -1)

    attn = types.ModuleType("exllamav2.attn")
    attn.ExLlamaV2Attention = ExLlamaV2Attention
    monkeypatch.setitem(sys.modules, "exllamav2", types.ModuleType("exllamav2"))
    monkeypatch.setitem(sys.modules, "exllamav2.attn", attn)
    return attn


def test_exllamav2s_sdpa_is_causal_with_the_patch_and_as_before_without(exllamav2):
    from runtime.engines.exllamav2_sdpa import PATCH, is_faulty

    original = exllamav2.ExLlamaV2Attention._attn_torch
    them = Patches([PATCH], version_of=lambda package: "0.3.2")

    was_faulty = is_faulty()
    hold = them.hold(PATCH.id)
    is_cured = not is_faulty()
    hold.close()

    assert was_faulty
    assert hold.state.status == "applied"
    assert is_cured
    assert exllamav2.ExLlamaV2Attention._attn_torch is original


def test_the_patched_attention_equals_causal_attention_also_for_one_new_token(exllamav2):
    import torch

    from runtime.engines.exllamav2_sdpa import PATCH

    layer = types.SimpleNamespace(layer_idx=0, sliding_window=0, scaling=0.5)
    cfg = types.SimpleNamespace(no_sdpa=False, attn_logit_softcapping=None)
    params = types.SimpleNamespace(block_diag_layers=set(), is_causal=lambda: True, get_block_diag_mask=lambda d: None)
    q, k, v = torch.randn(3, 1, 5, 2, 4)
    undo = PATCH.apply()

    attend = exllamav2.ExLlamaV2Attention._attn_torch
    whole = attend(layer, 1, 5, q, k, v, params, cfg)
    last = attend(layer, 1, 1, q[:, -1:], k, v, params, cfg)
    undo()

    heads = [x.transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.5)
    assert torch.allclose(whole, expected.transpose(1, 2).reshape(1, 5, -1), atol=1e-6)
    assert torch.allclose(last, whole[:, -1:], atol=1e-6)
