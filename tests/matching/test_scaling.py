"""Scales are learned on the objective, leave the function alone, and are never worse than none."""

import copy
import math

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.scaling import Scaling
from onebasin.symmetries import Transform
from tests.basis_networks import MLP, Attention, D, Model, SwiGLU, with_gains


def cnn(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(6 * 16, 4)),
    ).eval()


@pytest.fixture
def data():
    torch.manual_seed(0)
    x = torch.randn(128, 1, 8, 8)
    return [(part, part.mean((1, 2, 3)).sign().long().clamp(min=0)) for part in x.split(64)]


def mid(loss=nn.functional.cross_entropy):
    return ob.RandomPoint(loss, low=0.3, high=0.7)


def test_scales_lower_the_objective_and_keep_the_function(data):
    target, source = cnn(0), cnn(1)
    common = {"method": "weight-matching", "objective": mid(), "data": data, "kinds": "positive"}
    none = ob.align(source, target, **common, scaling=Scaling(steps=0))
    found = ob.align(source, target, **common, scaling=Scaling(steps=30))
    assert found.cost < none.cost - 0.01
    assert found.permutation == none.permutation
    assert [entry for entry in found.history if entry["by"] == "scales"]
    assert all(abs(float(value.mean())) < 1e-5 for value in found.scales.values())
    exact = copy.deepcopy(source).double()
    moved = copy.deepcopy(exact)
    moved.load_state_dict(found.transform.apply(exact))
    x = data[0][0].double()
    torch.testing.assert_close(moved(x), exact(x), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.model(data[0][0]), source(data[0][0]), rtol=1e-3, atol=1e-4)


def test_planted_scales_are_found_without_data():
    target = cnn(0)
    x = torch.randn(2, 1, 8, 8)
    symmetry = ob.symmetry(target, x, kinds="positive")
    planted = Transform.random(symmetry, torch.Generator().manual_seed(0))
    source = copy.deepcopy(target)
    source.load_state_dict(planted.apply(target))
    options = Scaling(steps=300, lr=0.1, limit=4.0)
    found = ob.align(source, target, symmetry=symmetry, init=planted.permutation.inverse(), method="weight-matching",
                     scaling=options)  # fmt: skip
    assert found.cost < 0.2 * found.start_cost


def test_no_scales_if_they_do_not_help(data):
    """At the target itself nothing is lower: scales stay one."""
    target = cnn(0)
    found = ob.align(target, target, data[0][0], kinds="positive", detect_copy=False, scaling=Scaling(steps=5))
    assert found.cost == 0
    assert found.transform.is_identity


def test_options_are_checked(data):
    for options in ({"steps": -1}, {"lr": 0}, {"limit": 0}, {"steps": 1.5}):
        with pytest.raises(ValueError, match="must be"):
            Scaling(**options)
    with pytest.raises(TypeError, match="scaling must be"):
        ob.align(cnn(0), cnn(1), data[0][0], scaling=3)
    with pytest.raises(ValueError, match="kinds must be"):
        ob.align(cnn(0), cnn(1), data[0][0], kinds="all of them")


def test_what_was_done_is_said(data):
    options = {"method": "weight-matching", "objective": mid(), "data": data, "kinds": "positive"}
    found = ob.align(cnn(1), cnn(0), **options, scaling=Scaling(steps=10))
    assert "Positive scales lowered the cost" in found.notes[-1]
    assert "scales up to" in repr(found)
    tanh = [nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(2)]
    found = ob.align(*tanh, **options)
    assert "no positive scales" in found.notes[-1]
    assert found.scales == {}
    assert isinstance(ob.merge(tanh, **options), nn.Sequential)


def test_a_symmetry_without_scales_is_refused(data):
    symmetry = ob.symmetry(cnn(0), data[0][0])
    for run in (ob.align, lambda a, b, **options: ob.merge([a, b], **options)):
        with pytest.raises(ValueError, match="has no positive scales"):
            run(cnn(0), cnn(1), symmetry=symmetry, kinds="positive")


def test_bases_lower_the_objective_and_keep_the_function():
    torch.manual_seed(0)
    networks = [Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(3)]).eval() for _ in range(2)]
    a, b = (with_gains(network) for network in networks)
    x = torch.randn(64, 4, 3)
    batches = [(part, part.mean(1).argmax(1).clamp(max=1)) for part in x.split(32)]

    def loss(output, target):
        return nn.functional.cross_entropy(output.mean(1), target)

    options = {"objective": ob.Midpoint(loss), "data": batches, "kinds": "all"}
    none = ob.align(b, to=a, **options, scaling=Scaling(steps=0))
    found = ob.align(b, to=a, **options, scaling=Scaling(steps=20))
    assert found.cost < none.cost
    assert sorted(basis.kind for basis in found.permutation.symmetry.bases.values()) == ["centred", "linear", "linear"]
    assert "gains of norms were folded" in found.notes[0]
    torch.testing.assert_close(found.model(x), b(x), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.target(x), a(x), rtol=1e-3, atol=1e-4)
    merged = ob.merge([a, b], **options, scaling=Scaling(steps=20))
    middle = ob.interpolate([found.target, found.model], [0.5, 0.5])
    for key, value in merged.state_dict().items():
        torch.testing.assert_close(value, middle[key])
    exact, moved = (copy.deepcopy(found.target).double() for _ in range(2))
    exact.load_state_dict({key: value.double() for key, value in ob.canonical(b, x).state.items()})
    moved.load_state_dict(found.transform.apply(exact))
    torch.testing.assert_close(moved(x.double()), exact(x.double()), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("rate", "steps"), [(0.01, 500), (0.1, 200)])
def test_learned_matrices_are_well_conditioned(rate, steps):
    """Without a bound the condition was 3e4 and more here, and the end in float32 moved by 2e-4 to 7e-3."""

    def make(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 12), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).eval()

    a, b = make(0), make(1)
    x = torch.randn(256, 5, generator=torch.Generator().manual_seed(7))
    labels = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
    batches = list(zip(x.split(64), labels.split(64), strict=True))
    goal = {"objective": ob.RandomPoint(nn.functional.cross_entropy), "data": batches, "kinds": "all"}
    given = ob.align(b, to=a, method="weight-matching", scaling=Scaling(steps=0), **goal)
    found = ob.align(b, to=a, method="weight-matching", scaling=Scaling(steps=steps, basis_lr=rate), **goal)
    assert found.cost < given.cost - 0.05
    ((name, matrix),) = found.matrices.items()
    start = given.matrices[name]
    stretches = torch.linalg.svdvals(matrix @ torch.linalg.inv(start)).log()
    assert float(stretches.abs().max()) <= Scaling().limit * (1 + 1e-9)
    assert float(torch.linalg.cond(matrix)) <= math.exp(2 * Scaling().limit) * float(torch.linalg.cond(start)) * (1 + 1e-9)
    with torch.no_grad():
        change = (found.model(x) - b(x)).abs().max() / b(x).abs().max()
        exact, moved = (copy.deepcopy(b).double() for _ in range(2))
        moved.load_state_dict(found.transform.apply(exact))
        torch.testing.assert_close(moved(x.double()), exact(x.double()), rtol=1e-11, atol=1e-12)
    assert float(change) < 1e-5


@pytest.fixture(scope="module")
def ends():
    """Two networks with gains, data, a loss, and the alignment in which both ends moved."""
    torch.manual_seed(0)
    networks = [Model([SwiGLU(), Attention()], [nn.LayerNorm(D) for _ in range(3)]).eval() for _ in range(2)]
    a, b = (with_gains(network).double() for network in networks)
    x = torch.randn(64, 4, 3, dtype=torch.float64)
    batches = [(part, part.mean(1).argmax(1).clamp(max=1)) for part in x.split(32)]

    def loss(output, target):
        return nn.functional.cross_entropy(output.mean(1), target)

    options = {"objective": ob.Midpoint(loss), "data": batches, "kinds": "all"}
    return a, b, options, ob.align(b, to=a, **options, scaling=Scaling(steps=20, both=True))


def test_both_ends_move_and_keep_their_functions(ends):
    a, b, options, found = ends
    x = options["data"][0][0]
    assert found.cost < ob.align(b, to=a, **options, scaling=Scaling(steps=0)).cost
    assert not found.target_transform.is_permutation
    assert found.target_transform.logarithms
    torch.testing.assert_close(found.model(x), b(x), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.target(x), a(x), rtol=1e-9, atol=1e-11)
    canonical = ob.canonical(a, x).state
    for key, value in found.target_transform.apply(canonical).items():
        torch.testing.assert_close(found.target.state_dict()[key], value)


def test_the_line_between_moved_ends_is_a_line_from_one_of_them(ends):
    """So moving both finds no better line than moving one can."""
    a, b, options, found = ends
    x = options["data"][0][0]
    whole = found.target_transform.inverse() @ found.transform
    states = [ob.canonical(each, x).state for each in (a, b)]
    one = copy.deepcopy(a)
    for share in (0.25, 0.5):
        one.load_state_dict(ob.interpolate([states[0], whole.apply(states[1])], [1 - share, share]))
        both = copy.deepcopy(a)
        both.load_state_dict(ob.interpolate([found.target, found.model], [1 - share, share]))
        torch.testing.assert_close(both(x), one(x), rtol=1e-9, atol=1e-11)


def test_a_merge_is_half_way_between_moved_ends(ends):
    a, b, options, found = ends
    moved = []
    merged = ob.merge([a, b], **options, scaling=Scaling(steps=20, both=True), on_aligned=moved.extend)
    for key, value in ob.interpolate([found.target, found.model], [0.5, 0.5]).items():
        torch.testing.assert_close(merged.state_dict()[key], value)
    for ours, theirs in zip(moved, (found.target_transform, found.transform), strict=True):
        assert ours.matrices.keys() == theirs.matrices.keys()
        for name, matrix in theirs.matrices.items():
            torch.testing.assert_close(ours.matrices[name], matrix)
    with pytest.raises(ValueError, match="both=True\\) is for two ends"):
        ob.merge([a, b, a], **options, scaling=Scaling(both=True))


def test_both_ends_move_on_a_loss_only(ends):
    a, b, options, _ = ends
    with pytest.raises(ValueError, match="moves both ends on a loss between them"):
        ob.align(b, to=a, example_inputs=options["data"][0][0], kinds="all", scaling=Scaling(both=True))
    with pytest.raises(ValueError, match="both must be True or False"):
        Scaling(both=1)
