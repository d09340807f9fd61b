import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onebasin as ob
from onebasin.tensors.states import read_state
from tests.matching.planted import DATA, METHODS, X, Y, mlp, pair, planted
from tests.networks import CASES


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", ["mlp relu", "batch norm 2d", "attention by hand", "grouped conv", "densenet", "tied embedding"]
)
def test_planted_permutations_are_found(method, name):
    torch.manual_seed(1)
    model = CASES[name].make()
    inputs = CASES[name].inputs()
    twin, symmetry, answer = planted(model, inputs)
    data = [(torch.randn(64, *inputs.shape[1:]) if inputs.is_floating_point() else inputs, None) for _ in range(4)]
    sweeps = {"detect_copy": False}
    options = {"activation-matching": {"data": data}, "sinkhorn": sweeps, "weight-matching": sweeps}.get(method, {})
    result = ob.align(twin, to=model, symmetry=symmetry, method=method, init=None, **options)
    if name == "tied embedding" and method == "activation-matching":
        assert result.cost <= result.start_cost  # the few tokens there are tell too little
        return
    assert result.cost == pytest.approx(0.0, abs=1e-9)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in result.model.state_dict().items())
    if name not in ("attention by hand",):
        assert result.permutation == answer


@pytest.mark.parametrize("name", ["mlp relu", "batch norm 2d", "grouped conv", "densenet", "tied embedding", "lstm"])
def test_one_look_finds_a_copy(name):
    torch.manual_seed(1)
    model = CASES[name].make()
    twin, symmetry, answer = planted(model, CASES[name].inputs())
    result = ob.align(twin, to=model, symmetry=symmetry)
    assert result.permutation == answer
    assert result.converged
    assert len(result.history) == 1


def test_a_look_that_finds_nothing_changes_nothing():
    a, b = mlp(), mlp()
    nn.init.normal_(b[0].weight)
    looked, plain = (ob.align(b, to=a, example_inputs=X, steps=5, detect_copy=first) for first in (True, False))
    assert looked.permutation == plain.permutation
    assert looked.history == plain.history


@pytest.mark.parametrize("name", ["lstm", "gru", "vision transformer"])
def test_activations_of_recurrence_and_attention(name):
    torch.manual_seed(0)
    model, inputs = CASES[name].make(), CASES[name].inputs()
    twin, symmetry, answer = planted(model, inputs)
    data = [(torch.randn(64, *inputs.shape[1:]), None) for _ in range(4)]
    assert ob.align(twin, to=model, symmetry=symmetry, method="activation-matching", data=data).permutation == answer


def test_nothing_is_touched_and_the_result_tells_all():
    model = mlp()
    twin, _, answer = planted(model, X)
    before = copy.deepcopy((model.state_dict(), twin.state_dict()))
    result = ob.align(twin, to=model, example_inputs=X, detect_copy=False)
    for state, kept in zip((model.state_dict(), twin.state_dict()), before, strict=True):
        assert all(torch.equal(state[key], value) for key, value in kept.items())
    assert result.permutation == answer
    assert result.converged
    assert result.cost == 0.0 < result.start_cost
    assert result.seconds > 0
    assert {"step", "soft", "hard", "gap", "best"} <= result.history[0].keys()
    assert "sinkhorn: cost" in repr(result)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("objective", ["weights", "midpoint", "random point", "custom"])
def test_no_method_ends_above_its_start(method, objective):
    torch.manual_seed(2)
    a, b = mlp(), mlp()
    for p in b.parameters():
        torch.nn.init.normal_(p, std=0.5)
    criterion = nn.functional.cross_entropy
    chosen = {
        "weights": None,
        "midpoint": ob.Midpoint(criterion),
        "random point": ob.RandomPoint(criterion),
        "custom": lambda params, target, batch: sum((params[k] - target[k]).abs().sum() for k in params),
    }[objective]
    symmetry = ob.symmetry(a, X)
    start = ob.align(b, to=a, symmetry=symmetry, method="weight-matching", objective=chosen, data=DATA)
    options = {"steps": 10} if method in ("sinkhorn", "ste") else {}
    result = ob.align(
        b, to=a, symmetry=symmetry, method=method, objective=chosen, data=DATA, init="weight-matching", **options
    )
    assert result.cost <= start.cost + 1e-9
    again = ob.align(
        b, to=a, symmetry=symmetry, method=method, objective=chosen, data=DATA, init=start.permutation, **options
    )
    assert again.cost <= start.cost + 1e-9


class _SquareResidual(nn.Module):
    """Square layers on a residual stream: a group on both axes of one tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 12), nn.Linear(12, 2)
        self.square = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.square:
            x = x + layer(x).relu()
        return self.last(x)


@pytest.mark.parametrize("name", ["mlp relu", "batch norm 2d", "attention by hand", "densenet", "lstm", "square residual"])
def test_without_data_the_default_costs_no_more_than_weight_matching(name):
    make, inputs = (_SquareResidual, X[:2]) if name == "square residual" else (CASES[name].make, CASES[name].inputs())
    for seed in range(4):
        torch.manual_seed(seed)
        target, source = make(), make()
        symmetry = ob.symmetry(target, inputs)
        weights = ob.align(source, to=target, symmetry=symmetry, method="weight-matching")
        default = ob.align(source, to=target, symmetry=symmetry, steps=20)
        assert default.cost <= weights.cost
        distances = [_distance(result.model, target) for result in (default, weights)]
        assert distances[0] <= distances[1] * (1 + 1e-6)


@pytest.mark.parametrize("seed", [17, 18])
def test_sweeps_after_the_default_without_data_are_those_of_weight_matching(seed):
    """Where sweeps in another order end in another optimum, which costs more than that of weight matching."""
    torch.manual_seed(seed)
    sizes = [4, 8, 8, 8, 2]
    target, source = (
        nn.Sequential(*(layer for i, o in itertools.pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())))[:-1]
        for _ in range(2)
    )
    weights = ob.align(source, to=target, example_inputs=torch.zeros(1, 4), method="weight-matching")
    assert ob.align(source, to=target, example_inputs=torch.zeros(1, 4)).cost <= weights.cost


@pytest.mark.parametrize("kinds", ["permutation", "positive", "all"])
@pytest.mark.parametrize("wrong", [nn.Linear(3, 8), nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2))])
def test_states_and_the_module_to_trace_must_fit(kinds, wrong):
    states = [nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).state_dict() for _ in range(2)]
    for call in (lambda **how: ob.align(states[1], to=states[0], **how), lambda **how: ob.merge(states, **how)):
        with pytest.raises(ValueError, match="module="):
            call(example_inputs=X[:2], module=wrong, kinds=kinds)


def _distance(model, target):
    pairs = zip(model.parameters(), target.parameters(), strict=True)
    return float(sum((p.detach().double() - q.detach().double()).square().sum() for p, q in pairs))


def test_data_that_an_objective_does_not_use_changes_nothing():
    a, b = pair()
    plain, given = (ob.align(b, to=a, example_inputs=X, method="sinkhorn", data=data) for data in (None, DATA))
    assert given.permutation == plain.permutation
    assert (given.cost, given.start_cost, given.history) == (plain.cost, plain.start_cost, plain.history)
    twin, symmetry, answer = planted(a, X)
    assert ob.align(twin, to=a, symmetry=symmetry, method="sinkhorn", data=DATA).permutation == answer


def test_the_start_cost_is_that_of_the_model_as_given():
    a, b = pair()
    start = ob.align(b, to=a, example_inputs=X, method="weight-matching")
    result = ob.align(b, to=a, example_inputs=X, method="ste", steps=1, init=start.permutation)
    assert result.start_cost == start.start_cost == pytest.approx(float(ob.WeightDistance()(b.state_dict(), a.state_dict())))
    assert result.cost <= start.cost


def test_a_loader_that_shuffles_is_judged_on_the_same_batches():
    a, b = pair()
    loader = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)
    options = {"objective": ob.Midpoint(nn.functional.cross_entropy), "data": loader, "steps": 3}
    state = torch.get_rng_state()
    first, second = (ob.align(b, to=a, example_inputs=X, **options) for _ in range(2))
    assert (first.start_cost, first.cost, first.history) == (second.start_cost, second.cost, second.history)
    assert ob.align(b, to=a, example_inputs=X, seed=1, **options).start_cost != first.start_cost
    assert torch.equal(torch.get_rng_state(), state)


def test_history_and_callback_have_every_entry():
    a, b = pair()
    seen = []
    result = ob.align(b, to=a, example_inputs=X, init="weight-matching", method="sinkhorn", steps=4, callback=seen.append)
    assert result.history == seen
    assert list(dict.fromkeys(entry["by"] for entry in seen)) == ["weight-matching", "sinkhorn", "polish"]
    assert all("inner" in entry for entry in seen if entry["by"] == "weight-matching")
    assert [entry["polish"] for entry in seen if "polish" in entry][-1] >= result.cost


def test_notebooks_show_it():
    a, b = pair()
    page = ob.align(b, to=a, example_inputs=X, method="weight-matching")._repr_html_()
    assert "<td>weight-matching</td>" in page


@pytest.mark.parametrize("method", METHODS)
def test_a_network_without_hidden_units_is_left_alone(method):
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    result = ob.align(b, to=a, example_inputs=X, method=method, data=DATA)
    assert result.cost == result.start_cost
    assert torch.equal(result.model.weight, b.weight)


def test_progress_is_for_people(capsys):
    ob.align(mlp(), to=mlp(), example_inputs=X, method="weight-matching", detect_copy=False, progress=True)
    captured = capsys.readouterr()
    assert "sweep 1: 0 of 2" in captured.err
    assert not captured.out


def test_groups_choose_and_freeze():
    model = mlp()
    twin, symmetry, answer = planted(model, X)
    result = ob.align(twin, to=model, symmetry=symmetry, groups=["0*"], method="weight-matching")
    assert torch.equal(result.permutation["2.weight"], torch.arange(10))
    frozen = ob.align(twin, to=model, symmetry=symmetry, groups=["2.weight"], init=answer)
    assert frozen.permutation == answer
    with pytest.raises(ValueError, match="no group matches"):
        ob.align(twin, to=model, symmetry=symmetry, groups=["x"])


def test_seeds_callbacks_and_options():
    model = mlp()
    twin, symmetry, _ = planted(model, X)
    seen = []
    descent = {"steps": 3, "noise": 0.1, "seed": 5, "polish": False}
    first, second = (
        ob.align(twin, to=model, symmetry=symmetry, detect_copy=False, **descent, callback=seen.append) for _ in range(2)
    )
    assert first.history == second.history
    assert len(seen) == 6
    assert not first.converged
    with pytest.raises(TypeError, match="'weight-matching' has no option 'steps'; it has max_sweeps"):
        ob.align(twin, to=model, symmetry=symmetry, method="weight-matching", steps=3)
    restarted = ob.align(twin, to=model, symmetry=symmetry, method="weight-matching", restarts=3)
    assert restarted.cost == 0.0


def test_restarts_end_when_nothing_can_cost_less():
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    symmetry = ob.symmetry(model, torch.zeros(1, 3))
    twin = symmetry.random(torch.Generator().manual_seed(0)).apply(model)
    once, entries = [], []
    ob.align(twin, to=model.state_dict(), symmetry=symmetry, callback=once.append)
    found = ob.align(twin, to=model.state_dict(), symmetry=symmetry, restarts=5, callback=entries.append)
    assert found.cost == 0
    assert len(entries) == len(once)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_models_may_differ_in_type(dtype):
    model = mlp().to(torch.bfloat16).float()  # so that the copy is exact in every type
    twin, symmetry, answer = planted(model, X)
    result = ob.align(twin.to(dtype), to=model, symmetry=symmetry)
    assert result.permutation == answer
    assert all(p.dtype == dtype for p in result.model.parameters())


def test_state_dicts_serve_where_no_network_is_run():
    model = mlp()
    twin, symmetry, answer = planted(model, X)
    result = ob.align(twin.state_dict(), to=model.state_dict(), symmetry=symmetry, method="weight-matching")
    assert result.permutation == answer
    assert isinstance(result.model, dict)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(to=nn.Linear(3, 2)), "different architectures"),
        (lambda a: a.update(to=mlp(9)), r"'0.weight' has shape \(10, 3\) in the model to permute and \(9, 3\)"),
        (lambda a: a["to"][0].weight.data.fill_(float("nan")), "'0.weight' of the model to align to holds NaN"),
        (lambda a: a.update(to=a["to"].to("meta")), "meta device"),
        (lambda a: a.update(method="magic"), "method must be one of"),
        (lambda a: a.update(init="magic"), "init must be a Permutation, a Transform or one of"),
        (lambda a: a.update(example_inputs=None), "give example_inputs="),
        (lambda a: a.update(method="activation-matching"), "needs modules, and data="),
        (lambda a: a.update(objective=ob.Midpoint(nn.functional.cross_entropy)), "Midpoint needs data"),
        (lambda a: a.update(data=iter(DATA)), "can be read once"),
    ],
)
def test_refusals_come_first(change, message):
    arguments = {"model": mlp(), "to": mlp(), "example_inputs": X}
    change(arguments)
    with pytest.raises((ValueError, TypeError), match=message):
        ob.align(**arguments)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_cuda(method):
    model = mlp(64)
    twin, symmetry, answer = planted(model, X)
    options = {"data": DATA} if method == "activation-matching" else {}
    result = ob.align(twin, to=model.cuda(), symmetry=symmetry, method=method, **options)
    assert result.permutation == answer


class _Whole(nn.Module):
    """Tied weights, a frozen parameter, a buffer and a plain attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.last.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.note = {"kept": [1, 2]}

    def forward(self, x):
        return self.scale * self.again(self.last(torch.tanh(self.first(x))))


def test_the_result_is_a_whole_copy_of_its_own():
    torch.manual_seed(0)
    target, model = _Whole(), _Whole()
    before = copy.deepcopy(model.state_dict())
    result = ob.align(model, to=target, example_inputs=X, method="weight-matching").model
    assert result.again.weight is result.last.weight
    assert [p.requires_grad for p in result.parameters()] == [p.requires_grad for p in model.parameters()]
    assert result.note == model.note
    assert result.note is not model.note
    mine = {value.data_ptr() for value in (*model.state_dict().values(), *target.state_dict().values())}
    assert mine.isdisjoint({value.data_ptr() for value in result.state_dict().values()})
    torch.testing.assert_close(result(X), model(X))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


ON_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
def test_the_global_generators_are_left_as_they_were(device):
    """Random points are drawn from them, seeded: the same each time, and nothing of it is seen outside."""
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(device) for _ in range(2))
    data = [(X.to(device), Y.to(device))]
    expected = torch.rand(3, device=device, generator=torch.Generator(device).manual_seed(5))
    torch.manual_seed(5)
    options = {"example_inputs": X[:1].to(device), "objective": ob.RandomPoint(nn.functional.cross_entropy), "data": data}
    first, second = (ob.align(b, to=a, steps=8, seed=3, **options) for _ in range(2))
    assert [entry["soft"] for entry in first.history] == [entry["soft"] for entry in second.history]
    assert torch.equal(torch.rand(3, device=device), expected)


@pytest.mark.parametrize("kinds", ["permutation", "positive", "all"])
def test_states_are_aligned_by_a_module_of_their_architecture(kinds):
    """Lazy ones too: what is found is what is found for the modules."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
        nn.init.uniform_(model[1].weight, 0.5, 1.5)
        return model.double()

    a, b, other, x = make(0), make(1), make(2), torch.randn(5, 4).double()
    options = {"example_inputs": x, "kinds": kinds, "method": "weight-matching", "scaling": ob.Scaling(steps=0)}
    expected = ob.align(b, to=a, **options)
    for states in ([a.state_dict(), b.state_dict()], [read_state(each).lazily() for each in (a, b)]):
        found = ob.align(states[1], to=states[0], module=other, **options)
        assert found.cost == pytest.approx(expected.cost, rel=1e-12)
        for key, value in expected.model.state_dict().items():
            torch.testing.assert_close(found.model[key], value, rtol=1e-12, atol=1e-12)
        merged = ob.merge(states, module=other, **options)
        for key, value in ob.merge([a, b], **options).state_dict().items():
            torch.testing.assert_close(merged[key], value, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module"):
        ob.align(states[1], to=states[0], module=x, **options)
    with pytest.raises(ValueError, match="states" if kinds == "all" else "of states module="):
        ob.align(states[1], to=states[0], **options)
