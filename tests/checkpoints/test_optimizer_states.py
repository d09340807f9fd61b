import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.checkpoints import move_optimizer
from onebasin.checkpoints.moving import move_file
from tests.checkpoints.adapted_network import TOKENS, Network, adapted


def trained(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS).square().sum().backward()
        optimizer.step()


def test_training_goes_on_as_if_nothing_had_moved(tmp_path):
    """The strongest oracle: resume on moved weights with the moved state, and arrive at the moved result."""
    model, _, permutation, _, _ = adapted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    twin = Network()
    twin.load_state_dict(permutation.apply(model))
    moved = move_file(permutation, tmp_path / "optimizer.pt")
    assert moved.kind == "optimizer"
    moved.write(tmp_path / "moved.pt")
    resumed = torch.optim.AdamW(twin.parameters(), lr=0.1)
    resumed.load_state_dict(torch.load(tmp_path / "moved.pt", weights_only=True))
    trained(model, optimizer)
    trained(twin, resumed)
    for key, value in permutation.apply(model).items():
        torch.testing.assert_close(twin.state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_optimizers_tell_the_names_of_their_parameters():
    model, _, permutation, _, _ = adapted()
    named = [(name, p) for name, p in model.named_parameters() if name.startswith(("conv", "last"))][::-1]
    optimizer = torch.optim.SGD(named, lr=0.1, momentum=0.9)
    trained(model, optimizer, 1)
    saved = optimizer.state_dict()
    moved = move_optimizer(permutation, saved)
    place = [name for name, _ in named].index("conv.weight")
    expected = permutation.move(saved["state"][place]["momentum_buffer"], permutation.symmetry.layouts["conv.weight"])
    assert torch.equal(moved["state"][place]["momentum_buffer"], expected)
    for group in saved["param_groups"]:
        del group["param_names"]
    with pytest.raises(ValueError, match="the optimiser has 4 parameters without names, the model 7: save the state"):
        move_optimizer(permutation, saved)
    with pytest.raises(ValueError, match="is not the state dict of an optimiser"):
        move_optimizer(permutation, {"state": {}})


def make_stack():
    """A network whose hidden layers have equal shapes, a permutation of it, and its parameters by name."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)]
    model = nn.Sequential(*layers)
    return model, ob.symmetry(model, torch.randn(2, 3)).random(), dict(model.named_parameters())


def step(model, groups):
    optimizer = torch.optim.Adam([{"params": list(group)} for group in groups])
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def assert_moved(permutation, saved, moved, names):
    """Each state is moved as its parameter is; `names` are in the order of the optimiser."""
    for number, name in enumerate(names):
        value = saved["state"][number]["exp_avg"]
        expected = permutation.move(value, permutation.symmetry.layouts[name])
        assert torch.equal(moved["state"][number]["exp_avg"], expected)


def test_groups_that_shapes_tell_apart_are_moved():
    """Weights that decay and biases that do not: the order is not that of the model, but certain."""
    model, permutation, parameters = make_stack()
    order = [*(name for name in parameters if "weight" in name), *(name for name in parameters if "bias" in name)]
    groups = [[parameters[name] for name in order[:4]], [parameters[name] for name in order[4:]]]
    saved = step(model, groups)
    assert_moved(permutation, saved, move_optimizer(permutation, saved), order)
    assert_moved(permutation, saved, move_optimizer(permutation, saved, order), order)
    del saved["state"][2]  # a parameter that never had a gradient, so that one of two states of this shape is left
    with pytest.raises(ValueError, match=r"cannot be told which of its states of shape \(8, 8\) is that of '2.weight'"):
        move_optimizer(permutation, saved)
    moved = move_optimizer(permutation, saved, order)
    assert 2 not in moved["state"]


@pytest.mark.parametrize("backwards", [False, True])
def test_groups_that_shapes_do_not_tell_apart_are_refused(backwards):
    model, permutation, parameters = make_stack()
    halves = [[name for name in parameters if name[0] in numbers] for numbers in ("02", "46")][:: -1 if backwards else 1]
    saved = step(model, [[parameters[name] for name in half] for half in halves])
    with pytest.raises(ValueError, match=r"groups of parameters without names, .* which of its states of shape \(8"):
        move_optimizer(permutation, saved)
    names = [name for half in halves for name in half]
    assert_moved(permutation, saved, move_optimizer(permutation, saved, names), names)
    for group, half in zip(saved["param_groups"], halves, strict=True):
        group["param_names"] = [f"module.{name}" for name in half]
    assert_moved(permutation, saved, move_optimizer(permutation, saved), names)


def test_states_that_move_alike_need_no_order():
    """The gain and the offset of a norm, in different groups."""
    model = nn.Sequential(nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    permutation, parameters = ob.symmetry(model.eval(), torch.randn(2, 3)).random(), dict(model.named_parameters())
    order = ["1.bias", "3.weight", "3.bias", "0.weight", "1.weight"]
    saved = step(model, [[parameters[name] for name in order[:2]], [parameters[name] for name in order[2:]]])
    assert_moved(permutation, saved, move_optimizer(permutation, saved), order)


def test_states_by_name_are_moved_by_name():
    """As tools for sharded models gather them: the names are in place of the numbers, in any order."""
    model, permutation, parameters = make_stack()
    saved = step(model, [parameters.values()])
    order = list(parameters)[::-1]
    named = {
        "state": {name: saved["state"][list(parameters).index(name)] for name in order},
        "param_groups": [{**saved["param_groups"][0], "params": order}],
    }
    moved = move_optimizer(permutation, named)
    for name, entries in named["state"].items():
        expected = permutation.move(entries["exp_avg"], permutation.symmetry.layouts[name])
        assert torch.equal(moved["state"][name]["exp_avg"], expected)


def test_damaged_states_are_refused():
    model, permutation, parameters = make_stack()
    saved = step(model, [parameters.values()])
    group = saved["param_groups"][0]
    for changes, message in (
        ({"state": {**saved["state"], 99: {}}}, "its states are not those of the parameters in its groups"),
        ({"state": {0: torch.zeros(2)}}, "its states are not those of the parameters in its groups"),
        ({"param_groups": [{**group, "params": [0, *group["params"][1:], 1]}]}, "its states are not those"),
        ({"param_groups": [{**group, "param_names": ["0.weight"]}]}, "has 8 parameters, but names of 1"),
        ({"param_groups": [{**group, "param_names": ["0.weight"] * 8}]}, "two parameters of one name"),
        ({"param_groups": [{**group, "param_names": [*list(parameters)[:7], "other"]}]}, "does not know .* 'other'"),
        ({"param_groups": [{**group, "params": group["params"][::-1]}]}, "its parameters are in another order"),
        ({"state": {**saved["state"], 0: {"factors": [torch.ones(3), torch.ones(8)]}}}, "is a container of tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            move_optimizer(permutation, {**saved, **changes})
