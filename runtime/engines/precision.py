"""How torch sums in 16-bit matrix products, set for a block of our own work and put back after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import ModelUnsupported

SUMS = ("auto", "full", "reduced")
SWITCHES = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def check(sums: object) -> str:
    """The choice, if it is one; raises ModelUnsupported else."""
    if sums not in SUMS:
        raise ModelUnsupported(f"sums is {sums!r}; it is one of {', '.join(SUMS)}.")
    return str(sums)


@contextlib.contextmanager
def matmul_sums(sums: str) -> Iterator[None]:
    """ "full" adds partial results in fp32, "reduced" may add them in 16 bits, "auto" leaves what the process has.

    The switches belong to the whole process (torch.backends.cuda.matmul), and image models run in it too: so
    they are set around each of our passes only.
    """
    if sums == "auto":
        yield
        return
    matmul: Any = torch.backends.cuda.matmul
    before = {name: getattr(matmul, name) for name in SWITCHES}
    try:
        for name in SWITCHES:
            setattr(matmul, name, sums == "reduced")
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
