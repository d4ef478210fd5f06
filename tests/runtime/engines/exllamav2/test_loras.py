"""LoRAs: which are read, and what they do to cached prefixes."""

import pytest

from runtime import ModelSpec
from runtime.engines import exllamav2
from runtime.errors import InvalidValue, ModelNotFound, ModelUnsupported
from tests.runtime.engines import exllamav2_cpu as cpu
from tests.runtime.engines.exllamav2.asking import LONG, ids_of, run, work


def test_other_loras_forget_the_cached_prefix(open_engine, tmp_path):
    engine = open_engine()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    run(engine, work(engine, LONG))

    engine.set_loras([(str(tmp_path), 2)])
    [with_lora] = run(engine, work(engine, LONG)).values()
    engine.set_loras([(str(tmp_path), 2)])
    [again] = run(engine, work(engine, LONG)).values()
    engine.set_loras([])
    [without] = run(engine, work(engine, LONG)).values()

    assert [steps[-1].details["num_cached_tokens"] >= 512 for steps in (with_lora, again, without)] == [
        False,
        True,
        False,
    ]
    assert ids_of(with_lora) == cpu.manual(LONG, 16, strength=2)
    assert ids_of(without) == cpu.manual(LONG, 16)


def test_loras_of_a_spec_are_read_line_by_line():
    spec = ModelSpec(model="m", options=(("loras", "/a b\n/c@d\n/e @ 0.5\n"),))

    assert exllamav2.read_loras(spec) == [("/a b", 1.0), ("/c@d", 1.0), ("/e", 0.5)]


@pytest.mark.parametrize("strength", ["nan", "inf", "-inf"])
def test_a_strength_that_is_no_number_is_told(strength):
    spec = ModelSpec(model="m", options=(("loras", f"/a @ {strength}"),))

    with pytest.raises(InvalidValue, match=rf"^The LoRA /a has the strength {strength}; write a number"):
        exllamav2.read_loras(spec)


def test_a_folder_that_is_no_lora_is_named(open_engine, tmp_path):
    with pytest.raises(ModelNotFound, match=r"adapter_config\.json"):
        open_engine(options=(("loras", str(tmp_path)),))


def test_a_lora_that_is_only_a_pickle_is_refused(open_engine, tmp_path):
    for name in ("adapter_config.json", "adapter_model.bin"):
        (tmp_path / name).touch()

    with pytest.raises(ModelUnsupported, match="may run code when opened"):
        open_engine(options=(("loras", str(tmp_path)),))
