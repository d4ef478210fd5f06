import math

import pytest

from runtime import ModelSpec, Prompt, Request, ResidentError, Sampling
from runtime.errors import InvalidValue


@pytest.mark.parametrize("device", ["meta", "cuda:x", "cuda:-1", "gpu", "cpu:0", "", "cuda:0 "])
def test_a_device_that_cannot_be_is_told_before_any_engine_is_asked(device):
    with pytest.raises(InvalidValue, match=r"^device is '.*'; it is auto, cpu, or a GPU such as cuda:0\.$"):
        ModelSpec(model="m", device=device)


@pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:0", "cuda:12", "xpu:1"])
def test_devices_have_the_names_that_torch_gives_them(device):
    assert ModelSpec(model="m", device=device).device == device


def test_a_precision_of_the_cache_that_no_engine_has_is_told_with_those_there_are():
    with pytest.raises(InvalidValue, match=r"^kv_cache is 'zzz'; it is one of auto, fp32, bf16, fp16, q8, q6, q4\.$"):
        ModelSpec(model="m", engine="scripted", kv_cache="zzz")


@pytest.mark.parametrize("value", ["8", 0, -1, 1.5, True, math.nan, math.inf])
def test_an_option_that_counts_takes_whole_numbers(value):
    spec = ModelSpec(model="m", options=(("max_batch", value),))

    with pytest.raises(InvalidValue, match=r"^The option max_batch is .*; it is a whole number from 1 on\.$"):
        spec.whole_number("max_batch", 8, least=1)


def test_an_option_that_counts_may_be_written_as_json_writes_it_or_left_out():
    assert ModelSpec(model="m", options=(("max_batch", 4.0),)).whole_number("max_batch", 8) == 4
    assert ModelSpec(model="m").whole_number("max_batch", 8) == 8


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_no_setting_of_the_sampling_takes_what_is_no_number(name, value):
    with pytest.raises(InvalidValue, match=rf"^{name} is {value}; it runs from"):
        Sampling(**{name: value})


def test_a_negative_host_copy_is_told():
    with pytest.raises(InvalidValue, match=r"^host_copy_bytes is -1;"):
        ModelSpec(model="m", host_copy_bytes=-1)


def test_a_value_that_cannot_be_is_one_of_our_errors_and_pythons_own_too():
    with pytest.raises(ResidentError):
        Request(prompt=Prompt.of("x"), seed=-1)
    with pytest.raises(ValueError):
        Request(prompt=Prompt.of("x"), max_tokens=0)
