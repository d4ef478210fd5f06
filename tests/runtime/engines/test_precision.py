import pytest

torch = pytest.importorskip("torch")

from runtime.engines.precision import SWITCHES, check, matmul_sums  # noqa: E402
from runtime.errors import ModelUnsupported  # noqa: E402


def switches():
    return [getattr(torch.backends.cuda.matmul, name) for name in SWITCHES]


@pytest.mark.parametrize(("sums", "inside"), [("full", False), ("reduced", True)])
@pytest.mark.parametrize("fails", [False, True])
def test_the_switches_hold_inside_the_block_and_are_put_back(sums, inside, fails):
    before = switches()

    try:
        with matmul_sums(sums):
            seen = switches()
            if fails:
                raise ValueError
    except ValueError:
        pass

    assert seen == [inside, inside]
    assert switches() == before


def test_auto_touches_nothing():
    before = switches()

    with matmul_sums("auto"):
        assert switches() == before


def test_a_word_that_is_no_choice_is_told():
    with pytest.raises(ModelUnsupported, match="sums is 'fast'; it is one of auto, full, reduced"):
        check("fast")
