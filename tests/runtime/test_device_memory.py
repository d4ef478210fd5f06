import sys
import types

import pytest

from runtime import device_memory
from runtime.device_memory import DeviceMemory, read, resolve


@pytest.fixture
def cuda(monkeypatch):
    """A torch with one CUDA device of 24 GB."""
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            mem_get_info=lambda device: (9, 24),
            memory_allocated=lambda device: 10,
            memory_reserved=lambda device: 13,
        )
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def test_the_devices_own_count_stands_beside_torchs(cuda):
    memory = read("cuda:0")

    assert memory == DeviceMemory(device="cuda:0", total=24, free=9, torch_allocated=10, torch_reserved=13)
    assert (memory.used, memory.torch_idle) == (15, 3)


def test_auto_is_the_current_cuda_device_else_the_cpu(cuda, monkeypatch):
    with_cuda = resolve("auto")
    monkeypatch.delitem(sys.modules, "torch")

    assert (with_cuda, resolve("auto"), resolve("cuda:1")) == ("cuda:0", "cpu", "cuda:1")


def test_without_torch_loaded_a_gpus_memory_is_not_known_and_torch_stays_unloaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    assert read("cuda:0") is None
    assert "torch" not in sys.modules


def test_the_hosts_memory_is_the_same_with_and_without_psutil(monkeypatch):
    with_psutil = read("cpu")
    monkeypatch.setitem(sys.modules, "psutil", None)
    without = read("cpu")

    assert with_psutil.total == without.total
    assert abs(with_psutil.free - without.free) < 0.2 * without.total


def test_where_nobody_tells_the_hosts_memory_is_not_known(tmp_path):
    assert device_memory._meminfo(str(tmp_path / "none")) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_memory_of_many_small_tensors_goes_back_to_the_system():
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()
    blocks = [bytearray(100_000) for _ in range(2000)]
    keep = bytearray(100_000)
    held = process.memory_info().rss

    del blocks
    device_memory.release_heap()

    assert held - process.memory_info().rss > 150_000_000
    assert keep
