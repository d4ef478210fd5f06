import doctest

import pytest

from runtime import wheels
from runtime.wheels import Platform, Wheel, mismatch, remedy

HERE = Platform(python="3.12.3", torch="2.11.0+cu130", cuda="13.0")


def flash(version="2.8.3+cu130torch2.11", tags=("cp312",)):
    return Wheel(name="flash_attn", version=version, python_tags=frozenset(tags))


def test_a_wheel_that_names_this_torch_cuda_and_python_fits():
    assert mismatch(flash(), HERE) is None
    assert mismatch(flash("2.8.3"), HERE) is None


@pytest.mark.parametrize(
    ("wheel", "here", "reason"),
    [
        (flash(tags=("cp311",)), HERE, "is for cp311, this Python is cp312"),
        (flash("2.8.3+cu130torch2.9"), HERE, "is for torch 2.9, torch here is 2.11.0+cu130"),
        (flash("2.8.3+cu12torch2.11"), HERE, "is for CUDA 12, torch here is for CUDA 13.0"),
        (flash("2.8.3+cu128torch2.11"), HERE, "is for CUDA 128, torch here is for CUDA 13.0"),
        (flash(), Platform(python="3.12.3", torch="2.11.0+cpu", cuda=None), "torch here is a CPU build"),
        (flash(), Platform(python="3.12.3", torch=None, cuda=None), "needs torch, which is not installed"),
    ],
)
def test_a_wheel_for_something_else_is_told_with_both_versions(wheel, here, reason):
    assert reason in mismatch(wheel, here)


@pytest.mark.parametrize(
    ("here", "advice"),
    [
        (HERE, "look for a flash_attn wheel for cp312, torch 2.11, CUDA 13.0, linux_x86_64"),
        (Platform(python="3.10.1", torch="2.13.0+cpu", cuda=None), "torch 2.13.0+cpu is a CPU build"),
        (Platform(python="3.10.1", torch=None, cuda=None), "install torch with CUDA first"),
    ],
)
def test_the_remedy_names_what_would_fit(here, advice):
    assert remedy("flash_attn", here).startswith(advice)


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(wheels).failed == 0
