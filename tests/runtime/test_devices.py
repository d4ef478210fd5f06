import types

import pytest

from runtime.devices import Devices

GB = 10**9


class NVMLError(Exception):
    pass


class Driver:
    """An NVML of one card that can be told to fail."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self):
        self.num_calls, self.is_broken, self.uuids = 0, False, []

    def nvmlInit(self):
        self.num_calls += 1
        if self.is_broken:
            raise NVMLError("driver/library version mismatch")

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"index {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.uuids.append(uuid)
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle):
        if self.is_broken:
            raise NVMLError("GPU is lost")
        return types.SimpleNamespace(total=24 * GB, free=10 * GB)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return types.SimpleNamespace(gpu=97, memory=61)

    def nvmlDeviceGetName(self, handle):
        return b"A Card"

    def nvmlDeviceGetPowerUsage(self, handle):
        raise NVMLError("not supported")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 350_000

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1740, 2: 9501}[kind]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 63

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return 16


class Torch:
    """A torch that sees two cards, with a context on the first only."""

    def __init__(self):
        self.asked = []
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            current_device=lambda: 0,
            get_device_name=lambda device: f"Card {device}",
            memory_reserved=lambda device: 3 * GB if device == "cuda:0" else 0,
            memory_allocated=lambda device: 2 * GB if device == "cuda:0" else 0,
            mem_get_info=self.mem_get_info,
            get_device_properties=lambda index: types.SimpleNamespace(uuid=f"0000-{index}"),
        )
        self.backends = types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: False))

    def mem_get_info(self, device):
        self.asked.append(device)
        return 10 * GB, 24 * GB


NO_TORCH = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))


def absent():
    raise ImportError("no pynvml")


@pytest.fixture
def driver():
    return Driver()


def test_the_driver_tells_all_and_what_a_card_does_not_tell_is_unknown(driver):
    state = Devices(load_nvml=lambda: driver, torch=NO_TORCH).read("cuda:0")

    assert (state.name, state.total_bytes, state.used_bytes) == ("A Card", 24 * GB, 14 * GB)
    assert (state.sm_busy, state.memory_busy, state.sm_clock_mhz, state.memory_clock_mhz) == (97, 61, 1740, 9501)
    assert (state.power_w, state.power_limit_w, state.pcie_gen, state.pcie_width) == (None, 350, 4, 16)


def test_cards_are_matched_by_uuid_since_cuda_may_number_them_otherwise(driver):
    Devices(load_nvml=lambda: driver, torch=Torch()).read("cuda:1")

    assert driver.uuids == ["GPU-0000-1"]


def test_without_nvml_torch_tells_what_it_knows_and_no_context_is_made(driver):
    torch = Torch()
    devices = Devices(load_nvml=absent, torch=torch)

    first, second = devices.read("cuda:0"), devices.read("cuda:1")

    assert (first.used_bytes, first.torch_reserved_bytes, first.sm_busy) == (14 * GB, 3 * GB, None)
    assert (second.used_bytes, second.name) == (None, "Card cuda:1")
    assert torch.asked == ["cuda:0"]
    assert "nvidia-ml-py" in devices.fault


def test_a_failing_driver_is_left_alone_longer_each_time_and_recovers(driver):
    now = [0.0]
    devices = Devices(load_nvml=lambda: driver, torch=NO_TORCH, clock=lambda: now[0])
    driver.is_broken = True
    calls = []

    for now[0] in (0, 0.5, 1.1, 2.0, 3.2, 5.0, 7.3):
        devices.read("cuda:0")
        calls.append(driver.num_calls)
    fault = devices.fault
    driver.is_broken = False
    now[0] = 16.0
    state = devices.read("cuda:0")

    assert calls == [1, 1, 2, 2, 3, 3, 4]
    assert "version mismatch" in fault
    assert (state.sm_busy, devices.fault) == (97, None)


def test_a_card_that_falls_off_in_the_middle_is_not_known_any_more(driver):
    devices = Devices(load_nvml=lambda: driver, torch=NO_TORCH)
    devices.read("cuda:0")
    driver.is_broken = True

    state = devices.read("cuda:0")

    assert (state.total_bytes, state.sm_busy) == (None, None)
    assert "GPU is lost" in devices.fault


def test_the_cpu_is_told_by_the_system():
    state = Devices(load_nvml=absent).read("cpu")

    assert 0 < state.used_bytes < state.total_bytes
    assert state.power_w is None
