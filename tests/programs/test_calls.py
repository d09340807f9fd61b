"""Example inputs as calls."""

import pytest
import torch

from onebasin.programs.calls import Call, read_calls


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
