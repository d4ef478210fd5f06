import pytest

torch = pytest.importorskip("torch")

from runtime.engines.parking import Parking  # noqa: E402


class Tied(torch.nn.Module):
    """Two layers with one weight, a view of it, and a buffer."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(32, 32)
        self.b = torch.nn.Linear(32, 32)
        self.b.weight = self.a.weight
        self.register_buffer("row", self.a.weight.detach()[3])
        self.register_buffer("steps", torch.arange(5))

    @torch.no_grad()
    def forward(self, x):
        return self.b(self.a(x)) + self.row


@pytest.fixture(params=[False, True], ids=["normal", "inference tensors"])
def module(request):
    with torch.inference_mode(request.param):
        return Tied()


def held(module):
    return sum({s.data_ptr(): s.nbytes() for t in module.state_dict().values() if (s := t.untyped_storage())}.values())


def test_parked_weights_hold_nothing_and_come_back_exactly(module):
    x = torch.randn(2, 32)
    expected, weight, parking = module(x), module.a.weight, Parking(module)

    is_parked = parking.park(1 << 20)
    held_meanwhile = held(module)
    progress = list(parking.unpark())

    assert is_parked
    assert held_meanwhile == 0
    assert torch.equal(module(x), expected)
    assert module.a.weight is weight is module.b.weight
    assert module.row.data_ptr() == weight[3].data_ptr()
    assert progress[-1].done == progress[-1].total == parking.num_bytes == held(module)


def test_the_second_eviction_has_nothing_to_copy(module):
    parking = Parking(module)
    parking.park(1 << 20)
    list(parking.unpark())
    copy = parking._copy.data_ptr()

    parking.park(0)

    assert held(module) == 0
    assert parking._copy.data_ptr() == copy


def test_over_the_budget_nothing_changes(module):
    parking = Parking(module)

    assert not parking.park(parking.num_bytes - 1)
    assert held(module) == parking.num_bytes
    assert parking.host_bytes == 0


def test_a_return_that_is_closed_leaves_it_parked_and_can_be_repeated(module, monkeypatch):
    monkeypatch.setattr("runtime.engines.parking.PROGRESS_BYTES", 1)
    x = torch.randn(2, 32)
    expected, parking = module(x), Parking(module)
    parking.park(1 << 20)

    returning = parking.unpark()
    next(returning)
    returning.close()
    held_meanwhile = held(module)
    list(parking.unpark())

    assert held_meanwhile == 0
    assert torch.equal(module(x), expected)


def test_a_module_moved_behind_its_back_is_noticed(module):
    parking = Parking(module)
    before = parking.is_in_place

    module.a.weight.data = module.a.weight.data.clone()

    assert before
    assert not parking.is_in_place
    assert not parking.park(1 << 20)


def test_forgetting_drops_the_copy(module):
    parking = Parking(module)
    parking.park(1 << 20)
    list(parking.unpark())

    assert parking.forget() >= parking.num_bytes
    assert parking.host_bytes == 0


def test_a_tensor_subclass_is_not_parked():
    class Packed(torch.Tensor):
        pass

    module = torch.nn.Linear(4, 4)
    module.register_buffer("packed", torch.zeros(4).as_subclass(Packed))

    assert not Parking(module).park(1 << 20)
