"""Settings for all tests of the runtime."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _one_torch_thread():
    """Tiny tensors on one thread: on a busy machine several would only wait for each other."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
