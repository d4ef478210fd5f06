import pytest


@pytest.fixture
def load(pack):
    return pack("nodes.load")


@pytest.mark.parametrize(("widget", "num_bytes"), [(-1, None), (0, 0), (2.5, 2_500_000_000)])
def test_the_host_copy_is_a_size_or_left_to_the_runtime(load, widget, num_bytes):
    assert load.host_copy_bytes(widget) == num_bytes


@pytest.mark.parametrize("widget", [float("nan"), float("inf"), float("-inf"), -0.5, -7])
def test_a_wired_number_that_is_no_size_is_told_by_its_name(load, pack, widget):
    with pytest.raises(pack("runtime.errors").InvalidValue, match=rf"^host_copy_gb is {widget}; it is a size in GB"):
        load.host_copy_bytes(widget)


@pytest.mark.parametrize("model", [{}, [], 3, ["a", 0]])
def test_a_model_that_is_no_name_is_told_in_a_sentence(pack, model):
    told = pack("nodes.menu").check(model)

    assert told.startswith("model is a value of the kind ")
    assert told.endswith("Wire in the name of a model of the menu.")
