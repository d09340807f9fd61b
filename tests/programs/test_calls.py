"""Example inputs as calls."""

import dataclasses

import pytest
import torch

from onebasin.programs.calls import Call, name_outputs, read_calls


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


def test_outputs_have_the_names_of_their_entries():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert name_outputs(a) == ["output"]
    assert name_outputs((a, b)) == ["output", "output"]
    assert name_outputs({"x": a, "y": [b, {"z": c}]}) == ["x", "y", "y"]
    record = dataclasses.make_dataclass("Record", ["x", "y"])
    assert name_outputs(record(a, (b, c))) == ["x", "y", "y"]
    assert name_outputs(record) == ["output"]
