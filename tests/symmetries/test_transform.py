"""Transforms form a group that acts on states, and are kept in files."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.programs.calls import read_calls
from onebasin.programs.frontends import read_program
from onebasin.symmetries import Basis, Place, Transform
from onebasin.symmetries.transform import TransformedSymmetry, load_element
from onebasin.symmetries.verification import Different, verify_programs
from onebasin.tensors.files import save_tensors
from onebasin.tensors.states import LazyState, read_state


class Heads(nn.Module):
    """A family of scales: one number for each unit of each head."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def cnn():
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))


NETWORKS = {"cnn": (cnn, (3, 2, 6, 6)), "heads": (Heads, (2, 3, 8))}


@pytest.fixture(params=NETWORKS)
def case(request):
    torch.manual_seed(0)
    make, shape = NETWORKS[request.param]
    model, x = make().double().eval(), torch.randn(shape, dtype=torch.float64)
    return model, x, ob.symmetry(model, x, kinds="positive")


def run(model, state, x):
    return torch.func.functional_call(model, state, (x,))


def test_the_function_stays(case):
    model, x, symmetry = case
    moved = Transform.random(symmetry, torch.Generator().manual_seed(1)).apply(model)
    assert any(not torch.equal(moved[key], value) for key, value in model.state_dict().items())
    torch.testing.assert_close(run(model, moved, x), model(x), rtol=1e-9, atol=1e-11)


def test_products_and_inverses(case):
    model, _, symmetry = case
    first, second = (Transform.random(symmetry, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    both, stepwise = (first @ second).apply(model), first.apply(second.apply(model))
    back = first.inverse().apply(first.apply(model))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(both[key], stepwise[key])
        torch.testing.assert_close(back[key], value)
    assert not first.is_identity
    assert Transform(symmetry.identity(), {}).is_identity


def test_files(case, tmp_path):
    model, _, symmetry = case
    transform = Transform.random(symmetry, torch.Generator().manual_seed(1))
    transform.save(tmp_path / "t.safetensors")
    loaded = Transform.load(tmp_path / "t.safetensors")
    assert repr(loaded) == repr(transform)
    for key, value in transform.apply(model).items():
        torch.testing.assert_close(loaded.apply(model)[key], value)
    transform.permutation.save(tmp_path / "p.safetensors")
    with pytest.raises(ValueError, match="not a onebasin transform"):
        Transform.load(tmp_path / "p.safetensors")
    with pytest.raises(ValueError, match="not a onebasin permutation"):
        ob.Permutation.load(tmp_path / "t.safetensors")
    assert isinstance(load_element(tmp_path / "t.safetensors"), Transform)
    assert load_element(tmp_path / "p.safetensors") == transform.permutation
    save_tensors(tmp_path / "x.safetensors", {"w": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match=r"is neither a onebasin permutation nor a onebasin transform \(format None\)"):
        load_element(tmp_path / "x.safetensors")


def test_one_group_alone(case):
    model, x, symmetry = case
    transform = Transform.random(symmetry, torch.Generator().manual_seed(1))
    name = symmetry.scales[next(iter(symmetry.scales))].group
    torch.testing.assert_close(run(model, transform.only(name).apply(model), x), model(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("number", range(2))
def test_what_is_done_to_a_group_is_found_by_its_name(number):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    transform = ob.Transform.random(ob.symmetry(model, torch.randn(5, 3), kinds="all"))
    name = ("0.weight", "2.weight")[number]
    index, logarithms, matrices = transform[name]
    assert torch.equal(index, transform.permutation[name])
    assert (list(logarithms), list(matrices)) == (([name], []), ([], [name]))[number]
    again = ob.Transform(
        ob.Permutation(transform.symmetry, transform.symmetry.identity().indices | {name: index}), logarithms, matrices
    )
    assert again == transform.only(name)
    with pytest.raises(KeyError, match="of no group"):
        transform["of no group"]


def test_scales_that_do_not_fit_are_refused(case):
    _, _, symmetry = case
    name = next(iter(symmetry.scales))
    with pytest.raises(ValueError, match="has no scale 'x'"):
        Transform(symmetry.identity(), {"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="has shape"):
        Transform(symmetry.identity(), {name: torch.zeros(99)})
    shape = Transform.random(symmetry).logarithms[name].shape
    with pytest.raises(ValueError, match="not finite"):
        Transform(symmetry.identity(), {name: torch.full(shape, float("nan"))})


def test_verification_allows_for_rounding_where_units_are_mixed():
    """An output that is zero because numbers cancel out does not stay zero in another basis."""
    model, x = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2)), torch.randn(4, 3)
    symmetry = ob.symmetry(model, x, kinds="all")
    assert symmetry.rounding == 0
    assert TransformedSymmetry(symmetry).rounding == 1e-12
    assert TransformedSymmetry(symmetry).change == "permuting or changing the basis"
    assert TransformedSymmetry(ob.symmetry(model, x, kinds="positive")).rounding == 0


def test_differences_are_transformed_linearly(case):
    model, _, symmetry = case
    transform = Transform.random(symmetry, torch.Generator().manual_seed(1))
    before = model.state_dict()
    vector = {key: torch.randn_like(value) for key, value in before.items() if key.endswith("weight")}
    moved = transform.apply_difference(vector)
    lazily = transform.apply_difference(read_state(vector).lazily())
    assert isinstance(lazily, LazyState)
    expected = transform.apply({key: value + vector.get(key, 0) for key, value in before.items()})
    for key, value in transform.apply(model).items():
        torch.testing.assert_close(expected[key], value + moved.get(key, 0) if key in moved else value)
        assert key not in moved or torch.equal(lazily[key], moved[key])
    with pytest.raises(ValueError, match=r"'x' has shape \(2,\), the symmetry does not know it"):
        transform.apply_difference({"x": torch.zeros(2)})
    key = next(iter(vector))
    with pytest.raises(ValueError, match=r"has shape \(1,\), the symmetry expects"):
        transform.apply_difference({key: torch.zeros(1)})


def test_offsets_are_gone_in_differences():
    """An eps is added to a variance before it is multiplied; in the difference of two variances it cancels out."""
    model, x = cnn().eval().double(), torch.randn(3, 2, 6, 6, dtype=torch.float64)
    transform = Transform.random(ob.symmetry(model, x, kinds="positive"))
    states = [{**model.state_dict(), "1.running_var": torch.rand(6, dtype=torch.float64)} for _ in range(2)]
    one, other = (transform.apply(state)["1.running_var"] for state in states)
    difference = {"1.running_var": states[0]["1.running_var"] - states[1]["1.running_var"]}
    torch.testing.assert_close(transform.apply_difference(difference)["1.running_var"], one - other, rtol=1e-12, atol=1e-14)


def test_gains_must_not_differ():
    model, x = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)).eval(), torch.randn(4, 3)
    transform = Transform.random(ob.symmetry(model, x, kinds="all"))
    transform.apply_difference({"1.weight": torch.zeros(8)})
    with pytest.raises(ValueError, match=r"'1.weight' differs between the two states.*canonical forms"):
        transform.apply_difference({"1.weight": torch.ones(8)})


def test_optimizers_follow_permutations_and_not_scales(case):
    model, x, symmetry = case
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    transform = Transform.random(symmetry, torch.Generator().manual_seed(1))
    assert not transform.is_permutation
    with pytest.raises(ValueError, match="cannot follow positive scales: gradients are divided"):
        transform.apply_optimizer(optimizer, model)
    permuting = Transform(transform.permutation, {name: 0 * value for name, value in transform.logarithms.items()})
    assert permuting.is_permutation
    moved = permuting.apply_optimizer(optimizer, model)
    expected = transform.permutation.apply_optimizer(optimizer, model)
    for number, entries in expected["state"].items():
        assert all(torch.equal(moved["state"][number][name], value) for name, value in entries.items())


@pytest.mark.parametrize("kind", ["orthogonal", "centred"])
@pytest.mark.parametrize("size", [8, 300])
def test_verification_refuses_bases_that_are_not_there(size, kind):
    """Groups of 300 units are reflected, groups of 8 are rotated; a tanh allows neither."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, size), nn.Tanh(), nn.Linear(size, 2)), torch.randn(4, 3)
    symmetry = ob.symmetry(model, x)
    (group,) = symmetry.groups
    places = {key: (Place(axis, 0, False),) for key, axis in {"0.weight": 0, "0.bias": 0, "2.weight": 1}.items()}
    wrong = replace(symmetry, bases={"b": Basis("b", group, kind, places)})
    programs = [read_program(model, call) for call in read_calls(x)]
    with pytest.raises(Different) as error:
        verify_programs(TransformedSymmetry(wrong), programs, read_state(model))
    assert error.value.guilty == [group]
    linear = nn.Sequential(model[0], nn.Identity(), model[2])
    programs = [read_program(linear, call) for call in read_calls(x)]
    assert verify_programs(TransformedSymmetry(wrong), programs, read_state(linear)) < 1e-12


def test_permutations_are_transforms(case):
    model, x, symmetry = case
    transform = Transform.random(symmetry, torch.Generator().manual_seed(1))
    permutation = ob.symmetry(model, x).random(torch.Generator().manual_seed(2))
    for product, stepwise in (
        (transform @ permutation, transform.apply(permutation.apply(model))),
        (permutation @ transform, permutation.apply(transform.apply(model))),
    ):
        assert isinstance(product, Transform)
        torch.testing.assert_close(dict(product.apply(model)), dict(stepwise))
    with pytest.raises(TypeError, match="unsupported operand"):
        transform @ 3  # type: ignore[operator]
    with pytest.raises(TypeError, match="unsupported operand"):
        permutation @ 3  # type: ignore[operator]


def test_equal_transforms(case):
    _, _, symmetry = case
    first, again, other = (Transform.random(symmetry, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert Transform(first.permutation, {}) != first
    ones = {name: torch.zeros_like(value) for name, value in first.logarithms.items()}
    assert Transform(first.permutation, ones) == Transform(first.permutation, {})
    assert Transform(first.permutation, ones) == first.permutation
    assert first.permutation == Transform(first.permutation, {})
    assert first != first.permutation
    assert first != "a transform"
    with pytest.raises(TypeError, match="unhashable"):
        hash(first)


def test_elements_of_other_symmetries_are_not_multiplied(case):
    _, _, symmetry = case
    transform = Transform.random(symmetry)
    alien = ob.symmetry(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(1, 2)).random()
    for multiply in (lambda: transform @ alien, lambda: alien @ transform):
        with pytest.raises(ValueError, match="different symmetries"):
            multiply()
