"""Example inputs as calls, and calls at other sizes."""

import pytest
import torch
from cases import call_of

from onebasin.programs.calls import Call, derive_calls, read_calls


def test_every_form_of_example_inputs():
    x = torch.rand(2, 3)
    assert read_calls(x) == [Call((x,), {})]
    assert read_calls((x, 1)) == [Call((x, 1), {})]
    assert read_calls({"x": x}) == [Call((), {"x": x})]
    assert read_calls([x, {"x": x}]) == [Call((x,), {}), Call((), {"x": x})]
    with pytest.raises(TypeError, match="got int"):
        read_calls(3)
    with pytest.raises(ValueError, match="is empty"):
        read_calls([])


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([torch.rand(2, 3)], [[(3, 3)]]),
        ([torch.rand(2, 3, 8, 8)], [[(3, 3, 8, 8)]]),
        ([torch.rand(2, 5, 4)], [[(3, 6, 4)], [(3, 5, 4)], [(2, 6, 4)]]),
        ([torch.ones(2, 5).long(), torch.rand(2, 4)], [[(3, 6), (3, 4)], [(3, 5), (3, 4)], [(2, 6), (2, 4)]]),
        ([torch.rand(())], []),
    ],
    ids=["features", "images", "sequences", "tokens and features", "a number"],
)  # fmt: skip
def test_sizes_grow_together_and_alone(inputs, expected):
    found = list(derive_calls(call_of(tuple(inputs))))
    assert [[tuple(leaf.shape) for leaf in call.leaves] for call in found] == expected


def test_types_and_other_arguments_are_kept():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    found = next(derive_calls(Call((mask, "mean"), {"scale": torch.rand(2, dtype=torch.float16)})))
    assert found.args[0].tolist() == [[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1]]
    assert found.args[1] == "mean"
    assert found.kwargs["scale"].dtype == torch.float16


def test_indices_are_drawn_from_those_that_are_valid():
    """A sequence of equal tokens would hide how they are told apart."""
    found = next(derive_calls(call_of(torch.tensor([[7], [3]]))))
    assert found.args[0].shape == (3, 2)
    assert len(found.args[0].unique()) > 2
    assert 0 <= found.args[0].min() <= found.args[0].max() <= 7
