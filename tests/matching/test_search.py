"""A search starts where it is told to, from permutations with scales and bases too, and does not end higher."""

import copy
import weakref

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.tensors.states import LazyState, read_state
from tests.basis_networks import MLP, Attention, D, Model, with_gains

X = torch.randn(64, 4, 3, generator=torch.Generator().manual_seed(0))
BATCHES = [(part, part.mean(1).argmax(1).clamp(max=1)) for part in X.split(32)]
FEW = ob.Scaling(steps=20)
NONE = ob.Scaling(steps=0)


def network(seed):
    torch.manual_seed(seed)
    return Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(3)]).eval()


def loss(output, target):
    return nn.functional.cross_entropy(output.mean(1), target)


LEARNED = {"kinds": "all", "objective": ob.Midpoint(loss), "data": BATCHES}


@pytest.fixture(scope="module")
def pair():
    """Two networks with gains, and a transform of the second that was learned on the loss between them."""
    a, b = (with_gains(network(seed)) for seed in range(2))
    return a, b, ob.align(b, to=a, **LEARNED, scaling=FEW)


@pytest.fixture(scope="module")
def planted():
    """A network, the same one transformed at random, and the symmetry and the transform that undoes it."""
    model = network(0).double()
    symmetry = ob.symmetry(model, X[:2].double(), kinds="all")
    drawn = ob.Transform.random(symmetry, torch.Generator().manual_seed(1))
    moved = copy.deepcopy(model)
    moved.load_state_dict(drawn.apply(model))
    return model, moved, symmetry, drawn.inverse()


def check_function(result, model):
    """The transform of a result leaves the function of the canonical form alone, in float64."""
    exact, moved = (copy.deepcopy(model).double() for _ in range(2))
    exact.load_state_dict({key: value.double() for key, value in ob.canonical(model, X).state.items()})
    moved.load_state_dict(result.transform.apply(exact))
    torch.testing.assert_close(moved(X.double()), exact(X.double()), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["weight-matching", "activation-matching", "ste"])
def test_the_result_costs_no_more_than_the_transform_it_starts_from(pair, method):
    a, b, start = pair
    options = {**LEARNED, "method": method, "scaling": NONE}
    assert ob.align(b, to=a, **options).cost > start.cost
    found = ob.align(b, to=a, init=start.transform, **options)
    assert found.cost <= start.cost * (1 + 1e-6)  # in float32
    check_function(found, b)
    middle = copy.deepcopy(a)
    middle.load_state_dict(ob.interpolate([found.target, found.model], [0.5, 0.5]))
    with torch.no_grad():
        cost = torch.stack([loss(middle(x), y) for x, y in BATCHES]).mean()
    assert float(cost) == pytest.approx(found.cost, rel=1e-5)


def test_learning_goes_on_from_a_transform(pair):
    a, b, start = pair
    found = ob.align(b, to=a, init=start.transform, scaling=FEW, **LEARNED)
    assert found.cost < start.cost - 0.01
    assert found.permutation == start.permutation
    check_function(found, b)


def test_without_data_weight_matching_goes_on_from_a_transform(planted):
    model, moved, symmetry, answer = planted
    given = {"symmetry": symmetry, "method": "weight-matching", "scaling": NONE}
    there = ob.align(moved, to=model, init=answer, **given)
    assert there.cost < 1e-20 * there.start_cost
    assert there.history[0]["moved"] == 0  # nothing that the start told is decided anew
    assert ob.align(moved, to=model, **given).history[0]["moved"] > 0
    generators = {name: matrix - torch.eye(matrix.shape[-1]) for name, matrix in answer.matrices.items()}
    near = {
        n: torch.eye(g.shape[-1]).double() + 1e-3 * g for n, g in generators.items() if symmetry.bases[n].kind == "linear"
    }
    beside = ob.Transform(symmetry.identity(), {}, near) @ answer
    found = ob.align(moved, to=model, init=beside, **given)
    begin = ob.WeightDistance()(beside.apply(moved), model.state_dict(), None)
    assert 0 < found.cost < 1e-2 * float(begin)


def test_other_groups_keep_what_they_start_with(planted):
    model, moved, symmetry, answer = planted
    name = next(n for n, basis in symmetry.bases.items() if basis.kind == "centred")
    chosen = symmetry.bases[name].group
    found = ob.align(moved, to=model, symmetry=symmetry, init=answer, groups=[chosen], scaling=NONE)
    assert found.cost < 1e-20 * found.start_cost
    for other, matrix in answer.matrices.items():
        torch.testing.assert_close(found.matrices[other], matrix)
    gone = ob.Transform(answer.permutation, answer.logarithms, {n: m for n, m in answer.matrices.items() if n != name})
    found = ob.align(moved, to=model, symmetry=symmetry, init=gone, groups=[chosen], scaling=NONE)
    assert found.cost < 1e-9 * found.start_cost  # the rotation of the stream is found again, the rest was given


def test_lazy_states_start_from_a_saved_transform(planted, tmp_path):
    model, moved, symmetry, answer = planted
    answer.save(tmp_path / "t.safetensors")
    states = [read_state(each).lazily() for each in (moved, model)]
    loaded = ob.Transform.load(tmp_path / "t.safetensors")
    found = ob.align(states[0], to=states[1], symmetry=symmetry, init=loaded, scaling=NONE)
    assert found.cost < 1e-20 * found.start_cost
    assert found.model.is_lazy
    for key, value in model.state_dict().items():
        torch.testing.assert_close(found.model[key], value)


def test_restarts_begin_at_random_after_the_transform(planted):
    model, moved, symmetry, answer = planted
    given = {"symmetry": symmetry, "scaling": NONE, "method": "weight-matching", "detect_copy": False}
    wrong = ob.Transform(symmetry.random_cycles(), {}, answer.matrices)
    begin = float(ob.WeightDistance()(wrong.apply(moved), model.state_dict(), None))
    found = ob.align(moved, to=model, init=wrong, restarts=2, **given)
    assert found.cost < 1e-3 * begin
    assert len({entry["sweep"] for entry in found.history}) < len(found.history)
    cost = float(ob.WeightDistance()(found.transform.apply(moved), model.state_dict(), None))
    assert cost == pytest.approx(found.cost, rel=1e-6)


def test_a_method_to_start_from_hands_on_its_rotations(planted):
    model, moved, symmetry, _ = planted
    given = {"symmetry": symmetry, "scaling": NONE, "method": ob.StraightThrough(steps=0)}
    found = ob.align(moved, to=model, init="weight-matching", **given)
    assert found.cost < 1e-6 * found.start_cost
    assert ob.align(moved, to=model, **given).cost > 0.5 * found.start_cost


def test_scales_of_normalised_twins_start_from_a_transform():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    x = torch.randn(64, 3)
    batches = [(x, x.argmax(1).clamp(max=1))]
    goal = {"objective": ob.Midpoint(nn.functional.cross_entropy, repaired=True), "data": batches, "kinds": "positive"}
    start = ob.align(*nets, method="weight-matching", scaling=ob.Scaling(steps=10), **goal)
    found = ob.align(*nets, init=start.transform, method="ste", steps=0, scaling=NONE, **goal)
    assert found.cost == pytest.approx(start.cost, rel=1e-5)
    (name,) = found.scales
    torch.testing.assert_close(found.scales[name], start.scales[name])


def test_a_transform_that_only_permutes_is_a_permutation():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2)]
    x = torch.zeros(1, 3)
    drawn = ob.symmetry(nets[0], x, kinds="all").random(torch.Generator().manual_seed(0))
    options = {"example_inputs": x, "method": "ste", "steps": 0}
    found = ob.align(*nets, init=ob.Transform(drawn, {}), **options)
    assert found.permutation == ob.align(*nets, init=drawn, **options).permutation
    assert not found.matrices


def test_a_transform_of_another_symmetry_is_refused(pair, planted):
    a, b, start = pair
    with pytest.raises(ValueError, match=r"transform given as init belongs to another symmetry.*kinds="):
        ob.align(b, to=a, example_inputs=X, init=start.transform)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match="another symmetry: its groups differ"):
        ob.align(net, to=net, example_inputs=X, kinds="all", init=start.transform)
    with pytest.raises(ValueError, match="init must be a Permutation, a Transform or one of"):
        ob.align(b, to=a, **LEARNED, init=3)


def test_models_are_merged_from_transforms(pair):
    a, b, start = pair
    c = with_gains(network(2))
    options = {**LEARNED, "method": "ste", "steps": 0, "scaling": NONE}
    other = ob.align(c, to=a, **LEARNED, scaling=ob.Scaling(steps=3)).transform
    moved = []
    ob.merge([a, b, c], init=[start.transform, other], on_aligned=moved.extend, **options)
    for found, given in zip(moved[1:], (start.transform, other), strict=True):
        for name, matrix in given.matrices.items():
            torch.testing.assert_close(found.matrices[name], matrix)


class Watched:
    """A state that is read from elsewhere, tensor by tensor, and how many of its entries are held at once."""

    def __init__(self, state):
        self.state, self.held, self.most = dict(state), 0, 0

    def lazily(self):
        return LazyState({key: value.to("meta") for key, value in self.state.items()}, self.read)

    def read(self, key):
        tensor = self.state[key].clone()
        self.held += tensor.numel()
        self.most = max(self.most, self.held)
        weakref.finalize(tensor, self.release, tensor.numel())
        return tensor

    def release(self, count):
        self.held -= count


def test_bases_of_files_are_matched_tensor_by_tensor(tmp_path):
    """All that is known of the networks is a symmetry that was saved with a transform."""
    networks = [network(seed).double() for seed in (0, 5)]
    symmetry = ob.symmetry(networks[0], X[:2].double(), kinds="all")
    ob.Transform(symmetry.identity(), {}).save(tmp_path / "t.safetensors")
    loaded = ob.Transform.load(tmp_path / "t.safetensors").symmetry
    watched = [Watched(each.state_dict()) for each in networks]
    target, source = (each.lazily() for each in watched)
    found = ob.align(source, to=target, symmetry=loaded, kinds="all")
    assert found.method == "weight-matching"
    assert len(found.matrices) == 3
    assert found.model.is_lazy
    total = sum(value.numel() for value in networks[0].parameters())
    assert all(0 < each.most < total / 2 for each in watched)
    states = [each.state_dict() for each in networks]
    held = ob.align(states[1], to=states[0], symmetry=symmetry, scaling=NONE)
    assert found.cost == pytest.approx(held.cost, rel=1e-9)
    for key, value in held.model.items():
        torch.testing.assert_close(found.model[key], value)
    learned = ob.align(source, to=target, symmetry=loaded, scaling=FEW)
    assert learned.cost < found.cost
    merged = ob.merge([target, source], symmetry=loaded, kinds="all")
    assert merged.is_lazy
    for key, value in ob.interpolate([states[0], held.model], [0.5, 0.5]).items():
        torch.testing.assert_close(merged[key], value)


def test_states_that_are_not_canonical_or_have_no_symmetry_are_refused(pair):
    a, b, start = pair
    states = [read_state(each).lazily() for each in (b, a)]
    with pytest.raises(ValueError, match=r"or states in canonical form, and symmetry="):
        ob.align(*states, kinds="all")
    with pytest.raises(ValueError, match=r"must be filled with 1 for a change of basis.*onebasin canonical"):
        ob.align(*states, symmetry=start.transform.symmetry, kinds="all")
