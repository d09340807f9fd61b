"""A fine-tune of a permuted, transformed or narrower network is carried over exactly; what does not fit is refused."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from tests.basis_networks import MLP, Attention, D, Model, with_gains

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def mlp(width: int = 9) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def change(model: nn.Module) -> nn.Module:
    """A fine-tune: small changes of all weights."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return changed


def permute(model: nn.Module, inputs: torch.Tensor) -> tuple[nn.Module, ob.Permutation]:
    permutation = ob.symmetry(model, inputs).random(torch.Generator().manual_seed(1))
    moved = copy.deepcopy(model)
    moved.load_state_dict(permutation.apply(model))
    return moved, permutation


def test_on_a_permuted_copy_the_port_is_the_permuted_fine_tune():
    torch.manual_seed(0)
    old = mlp()
    new, permutation = permute(old, X)
    fine = change(old)
    before = copy.deepcopy([model.state_dict() for model in (fine, old, new)])
    found = ob.port(fine, base=old, to=new, example_inputs=X)
    assert found.scale == 1.0
    assert found.alignment.permutation == permutation
    assert torch.allclose(found.model(X), fine(X), atol=1e-6)
    half = ob.port(fine, base=old, to=new, example_inputs=X, scale=0.5).model.state_dict()
    for key, value in permutation.apply(fine).items():
        assert torch.allclose(half[key], (value + new.state_dict()[key]) / 2, atol=1e-6)
    for model, state in zip((fine, old, new), before, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_adding_the_difference_without_an_alignment_is_another_network():
    torch.manual_seed(0)
    old = mlp()
    new, _ = permute(old, X)
    fine = change(old)
    naive = ob.interpolate([new, fine, old], [1, 1, -1])
    assert not torch.allclose(torch.func.functional_call(new, dict(naive), (X,)), fine(X), atol=1e-2)


def test_changes_of_basis_carry_it_too():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    old = with_gains(Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(3)])).eval().double()
    form = ob.canonical(old, x).model
    transform = ob.Transform.random(ob.symmetry(form, x, kinds="all"), torch.Generator().manual_seed(2))
    new = copy.deepcopy(form)
    new.load_state_dict(transform.apply(form))
    fine = change(old)
    found = ob.port(fine, base=old, to=new, example_inputs=x, kinds="all", method="weight-matching")
    assert found.alignment.cost < 1e-10
    assert torch.allclose(found.model(x), fine(x), rtol=1e-6, atol=1e-8)


def test_permutations_carry_it_where_there_is_nothing_else():
    old = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 3))
    new, _ = permute(old, X)
    fine = change(old)
    found = ob.port(fine, base=old, to=new, example_inputs=X, kinds="all")
    assert torch.allclose(found.model(X), fine(X), atol=1e-5)
    assert "There are no positive scales or changes of basis in this symmetry." in found.alignment.notes


def test_a_fine_tune_of_a_narrow_network_goes_to_a_wide_one():
    torch.manual_seed(0)
    old = mlp()
    new, _ = permute(ob.widen(old, like=mlp(14), example_inputs=X), X)
    fine = change(old)
    found = ob.port(fine, base=old, to=new, example_inputs=X)
    assert torch.allclose(found.model(X), fine(X), atol=1e-5)


def test_the_scale_with_the_lowest_loss_is_taken():
    torch.manual_seed(0)
    old = mlp()
    new, permutation = permute(old, X)
    fine = change(old)
    goal = ob.interpolate([new, permutation.apply(fine)], [0.25, 0.75])
    wanted = torch.func.functional_call(new, dict(goal), (X,)).detach()

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"loss": float((model(X) - wanted).square().mean())}

    found = ob.port(fine, base=old, to=new, example_inputs=X, scale=[0.25, 0.75, 1.0], evaluate=evaluate)
    assert found.scale == 0.75
    assert list(found.losses) == [0.25, 0.75, 1.0]
    assert torch.allclose(found.model(X), wanted, atol=1e-6)


def test_statistics_are_those_of_the_new_base():
    torch.manual_seed(0)
    old, new = (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval() for _ in range(2))
    fine = change(old)
    fine[1].running_var *= 3
    found = ob.port(fine, base=old, to=new, example_inputs=X)
    assert torch.equal(found.model[1].running_var, new[1].running_var)


def test_state_dicts_serve():
    torch.manual_seed(0)
    old = mlp()
    new, _ = permute(old, X)
    fine = change(old)
    symmetry = ob.symmetry(old, X)
    found = ob.port(fine.state_dict(), old.state_dict(), new.state_dict(), symmetry=symmetry, method="weight-matching")
    assert torch.allclose(torch.func.functional_call(new, dict(found.model), (X,)), fine(X), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": [0.5, 1.0]}, "evaluate="),
        ({"scale": []}, "scale must be a finite number"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"base": mlp(8)}, "different architectures"),
        ({"to": nn.Linear(4, 3)}, "different architectures"),
        ({"to": mlp(5)}, "different architectures"),
    ],
)
def test_refusals(arguments, message):
    torch.manual_seed(0)
    call = {"fine_tuned": mlp(), "base": mlp(), "to": mlp(), "example_inputs": X, **arguments}
    with pytest.raises(ValueError, match=message):
        ob.port(**call)


def test_a_fine_tune_that_is_no_number_is_refused():
    broken = mlp()
    broken[0].weight.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match="the fine-tuned model"):
        ob.port(broken, base=mlp(), to=mlp(), example_inputs=X)


def test_networks_are_untied_before_they_are_given():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with pytest.raises(TypeError, match=r"port has no argument untie=.*canonical\(\.\.\., untie=True\)"):
        ob.port(model, base=model, to=model, example_inputs=torch.zeros(1, 4), untie=True)
