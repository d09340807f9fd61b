import pytest
import torch
from torch import Tensor, nn

from onebasin.landscape.batches import StopForward, check_data, copy_model, find_example, run_batches, take_example


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[Tensor, float]] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> None:
        assert not torch.is_grad_enabled()
        self.seen.append((x, scale))


def test_a_batch_is_inputs_or_a_pair():
    x, y = torch.ones(2), torch.zeros(2)
    model = Recorder()
    run_batches(model, [x, (x, y), [x, y], (x,), ((x, 3.0), y), {"x": x, "scale": 4.0}, ({"x": x}, y)])
    assert [scale for _, scale in model.seen] == [1, 1, 1, 1, 3, 4, 1]
    assert all(torch.equal(seen, x) for seen, _ in model.seen)


def test_examples_are_rows_of_the_first_batch():
    x, y = torch.randn(8, 3), torch.zeros(8)
    assert torch.equal(take_example([(x, y), (y, y)]), x[:2])
    assert torch.equal(take_example([x]), x[:2])
    first, second = take_example([([x, x], y)])
    assert torch.equal(first, second)
    assert len(first) == 2
    mask = torch.zeros(5, 5)  # has no rows of the batch
    whole = take_example([({"x": x, "mask": mask}, y)])
    assert whole["x"] is x
    assert whole["mask"] is mask
    assert take_example([]) is None


def test_a_split_tensor_is_batches():
    parts = torch.randn(8, 3).split(3)
    assert check_data(parts) is parts


def test_refusals():
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"pair \(inputs, target\); got a tuple of 3"):
        run_batches(Recorder(), [(x, x, x)])
    with pytest.raises(ValueError, match="no batches"):
        run_batches(Recorder(), [])
    with pytest.raises(TypeError, match="a generator can be read once"):
        check_data(x for _ in range(2))
    with pytest.raises(TypeError, match="got dict"):
        copy_model({})  # type: ignore[arg-type]


def test_a_hook_can_stop_the_pass():
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []

    def stop(*_):
        raise StopForward

    model[0].register_forward_hook(stop)
    model[1].register_forward_hook(lambda *_: seen.append(1))
    run_batches(model, [torch.ones(1, 2)] * 3)
    assert not seen


def test_a_copy_is_in_eval_mode_and_its_own():
    model = nn.Linear(2, 2)
    ours = copy_model(model)
    assert model.training
    assert not ours.training
    assert ours.weight is not model.weight


def test_inputs_that_are_given_come_before_those_of_the_data():
    data = [(torch.zeros(8, 3), torch.zeros(8))]
    assert find_example(None, None) is None
    assert find_example(None, data).shape == (2, 3)
    assert find_example("inputs", data) == "inputs"
