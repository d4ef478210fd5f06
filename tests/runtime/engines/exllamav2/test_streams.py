"""The SDK's CUDA stream beside the host's."""

import sys
from types import SimpleNamespace

import pytest
import torch

from runtime.engines import exllamav2_sdk


class Stream:
    """A CUDA stream that remembers which streams it was told to wait for."""

    def __init__(self, device):
        self.device_index, self.waited = device, []

    def wait_stream(self, other):
        self.waited.append(other)


@pytest.fixture
def cuda(monkeypatch):
    """CUDA as torch tells of it, with the SDK's stream on device 1 and the host's in place."""
    state = SimpleNamespace(device=1, stream=Stream(1), own=Stream(1))

    def set_stream(stream):
        state.device, state.stream = stream.device_index, stream

    for name, value in {
        "is_available": lambda: True,
        "current_stream": lambda: state.stream,
        "set_stream": set_stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    find = SimpleNamespace(get_device_stream=lambda device: state.own if device == 1 else None)
    monkeypatch.setitem(sys.modules, "exllamav2.device", find)
    return state


def test_the_sdk_runs_on_its_stream_and_the_hosts_is_back_after_it_and_waits(cuda):
    host = cuda.stream

    with pytest.raises(ZeroDivisionError), exllamav2_sdk.host_stream_kept():
        assert cuda.stream is cuda.own
        cuda.device = 0
        _ = 1 / 0

    assert (cuda.device, cuda.stream) == (1, host)
    assert (cuda.own.waited, host.waited) == ([host], [cuda.own])


def test_between_the_steps_of_a_generation_neither_stream_waits(cuda):
    host = cuda.stream

    with exllamav2_sdk.host_stream_kept(must_wait=False):
        assert cuda.stream is cuda.own

    assert cuda.stream is host
    assert cuda.own.waited == host.waited == []
