import pytest

from runtime import ModelSpec
from runtime.engines import footprint, load
from runtime.errors import EngineUnavailable, OutOfMemory

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def spec_of(path, **fields):
    return ModelSpec(model=str(path), engine="transformers", device="cpu", context_len=256, **fields)


def loaded(spec):
    loading, progress = load(spec), []
    while True:
        try:
            progress.append(next(loading))
        except StopIteration as end:
            return end.value, progress


@pytest.mark.slow
def test_a_gguf_gives_the_weights_of_the_folder_that_was_made_from_it(gguf_path, model_path):
    pytest.importorskip("gguf")
    folder, _ = loaded(spec_of(model_path))

    packed, progress = loaded(spec_of(gguf_path))

    wanted = dict(folder._model.named_parameters())
    for name, parameter in packed._model.named_parameters():
        assert torch.equal(parameter, wanted.pop(name)), name
    assert not wanted
    assert packed.bytes == folder.bytes
    dones = [step.done for step in progress]
    assert dones == sorted(dones)
    assert len(dones) > 200


def test_a_gguf_that_is_too_large_dequantised_is_refused_with_the_numbers(gguf_path, monkeypatch):
    from runtime.device_memory import DeviceMemory
    from runtime.engines import transformers_plan

    pytest.importorskip("gguf")
    monkeypatch.setattr(transformers_plan, "read_memory", lambda _: DeviceMemory(device="cpu", total=10**9, free=10**8))

    with pytest.raises(OutOfMemory, match=r"has 96\.6 MB, and needs 538\.1 MB .* 100\.0 MB of memory are free"):
        loaded(spec_of(gguf_path))


def test_its_bytes_are_counted_before_loading(gguf_path):
    assert footprint(spec_of(gguf_path)).weights == 4 * 134_515_008
    assert footprint(spec_of(gguf_path, dtype="bf16")).weights == 2 * 134_515_008


def test_packages_that_lack_are_named(gguf_path, monkeypatch):
    from runtime.engines import transformers_gguf

    monkeypatch.setattr(transformers_gguf.importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(EngineUnavailable, match=r"needs gguf and accelerate\. Try: .* -m pip install gguf accelerate"):
        next(transformers_gguf.load_gguf(None, "auto"))
