"""The table of methods, and their options as dataclasses."""

from dataclasses import fields

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.methods import METHODS, MethodOptions, make_method
from tests.networks import CASES


def test_keyword_options_are_those_of_the_methods():
    declared = {field.name: field.type for method in METHODS.values() for field in fields(method)}
    assert MethodOptions.__annotations__.keys() == declared.keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_name_and_an_instance_are_the_same(name):
    assert make_method(name, {}) == METHODS[name]()
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2))
    data = [(torch.randn(16, 3), None)]
    named, given = (ob.align(b, to=a, data=data, method=method) for method in (name, METHODS[name]()))
    assert named.permutation == given.permutation
    assert named.method == given.method == name


@pytest.mark.parametrize("name", ["sinkhorn", "ste", "exchange", "auto"])
def test_tied_networks_are_matched_on_a_loss(name):
    """PyTorch refuses to run a network on a state in which tied keys are several tensors."""
    torch.manual_seed(0)
    a, b = (CASES["tied embedding"].make() for _ in range(2))
    data = [(ids, a(ids).detach()) for ids in torch.randint(0, 10, (4, 8, 5))]
    options = {} if name == "auto" else {"steps": 2} if name in ("sinkhorn", "ste") else {"rounds": 1}
    method = name if name == "auto" else METHODS[name](**options)
    result = ob.align(b, to=a, objective=ob.Midpoint(nn.functional.mse_loss), data=data, method=method)
    assert result.cost <= result.start_cost
    torch.testing.assert_close(result.model(data[0][0]), b(data[0][0]))
    assert result.model.head.weight is result.model.embed.weight
