import copy
import itertools

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.scaling import Scaling
from tests.basis_networks import MLP, Attention, D, Gated, Model, RMSNorm, Tied, with_gains

X = torch.randn(128, 3, generator=torch.Generator().manual_seed(0))


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))


def copies(count: int) -> tuple[nn.Module, list[nn.Module]]:
    """A model, and permuted copies of it."""
    model = mlp()
    symmetry = ob.symmetry(model, X)
    result = [model]
    for seed in range(1, count):
        twin = copy.deepcopy(model)
        twin.load_state_dict(symmetry.random(torch.Generator().manual_seed(seed)).apply(model))
        result.append(twin)
    return model, result


@pytest.mark.parametrize("to", ["first", "mean", "common"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_permuted_copies_merge_to_the_same_function(to, count):
    model, models = copies(count)
    before = [copy.deepcopy(m.state_dict()) for m in models]
    merged = ob.merge(models, example_inputs=X, reference=to)
    torch.testing.assert_close(merged(X), model(X))
    for m, kept in zip(models, before, strict=True):
        assert all(torch.equal(m.state_dict()[key], value) for key, value in kept.items())


def test_the_mean_of_many_is_no_worse_than_the_first():
    """Aligned to the mean of the others, models are closer together than aligned to the first."""
    models = [mlp(seed) for seed in range(4)]
    symmetry = ob.symmetry(models[0], X)

    def spread(to: str) -> float:
        merged = ob.merge(models, symmetry=symmetry, reference=to, method="weight-matching").state_dict()
        return -sum(float(value.square().sum()) for value in merged.values())  # the larger the mean, the closer they are

    assert spread("mean") <= spread("first") + 1e-4


@pytest.mark.parametrize("reference", ["first", "mean"])
def test_each_model_starts_where_it_is_told(reference):
    models = [mlp(seed) for seed in range(3)]
    symmetry = ob.symmetry(models[0], X)
    starts = [symmetry.random(torch.Generator().manual_seed(seed)) for seed in range(2)]
    options = {"symmetry": symmetry, "method": "exchange", "detect_copy": False, "polish": False}
    found = []
    ob.merge(models, init=starts, reference=reference, on_result=lambda *each: found.append(each), **options)
    for (number, result), model, start in zip(found[:2], models[1:], starts, strict=True):
        expected = ob.align(model, to=models[0], init=start, **options)
        assert result.permutation == expected.permutation
        assert number in (1, 2)
    for _, result in found[2:]:  # the models have been moved: a start for them as they were has no meaning any more
        assert result.cost <= result.start_cost


@pytest.mark.parametrize("starts", [[], ["sinkhorn"], ["sinkhorn"] * 3])
def test_there_is_one_start_for_each_model(starts):
    with pytest.raises(ValueError, match=f"2 models are aligned to the first, and init has {len(starts)} starts"):
        ob.merge([mlp(seed) for seed in range(3)], X, init=starts)
    with pytest.raises(ValueError, match="init must be a Permutation, a Transform or one of"):
        ob.merge([mlp(seed) for seed in range(3)], X, init=["sinkhorn", "magic"])


@pytest.mark.parametrize("reference", ["first", "mean"])
def test_every_alignment_is_reported(reference):
    models = [mlp(seed) for seed in range(3)]
    alignments, permutations = [], []
    arguments = {"method": "weight-matching", "reference": reference}
    ob.merge(models, X, on_result=lambda *found: alignments.append(found), on_aligned=permutations.extend, **arguments)
    assert [number for number, _ in alignments][:2] == [1, 2]
    assert all(alignment.method == "weight-matching" for _, alignment in alignments)
    if reference == "first":
        assert [alignment.permutation for _, alignment in alignments] == permutations[1:]
    else:
        assert {0, 1, 2} <= {number for number, _ in alignments[2:]}


def test_weights():
    _, models = copies(2)
    merged = ob.merge(models, example_inputs=X, weights=[1, 0])
    assert all(torch.equal(value, models[0].state_dict()[key]) for key, value in merged.state_dict().items())


def normed(seed: int) -> nn.Module:
    """A network with a batch norm, whose variances are from 1 to 2 for the seed 0, and larger for larger seeds."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2)).eval()
    nn.init.uniform_(model[1].running_var, 2.0**seed, 2.0 ** (seed + 1))
    return model


def test_negative_weights_never_give_negative_variances():
    models = [normed(0), normed(1)]
    merged = ob.merge(models, example_inputs=X, weights=[-0.2, 1.2])
    assert merged(X).isfinite().all()
    for given in (models, [model.state_dict() for model in models]):
        with pytest.raises(ValueError, match=r"'1.running_var' of a batch norm would be negative with the weights 3, -2"):
            ob.merge(given, symmetry=ob.symmetry(models[0], X), weights=[3, -2])


def test_negative_weights_without_a_meaning_are_refused_at_once():
    models = [normed(0), normed(1), normed(2)]
    with pytest.raises(ValueError, match="no weight may be below zero"):
        ob.merge(models, example_inputs=X, weights=[2, 1, -1], repair=[X])
    for weights in ([2, 1, -1], [1, 0, 0]):
        with pytest.raises(ValueError, match="the weights of some sum to zero"):
            ob.merge(models, example_inputs=X, weights=weights, reference="mean")


@pytest.mark.parametrize("form", ["repair", "rescale", "closed-form", "norms", "bias"])
def test_forms_of_repair_have_names(form):
    models = [mlp(seed) for seed in range(2)]
    options = {"example_inputs": X, "method": "weight-matching", "data": [X]}
    aligned = []
    merged = ob.merge(models, repair=form, on_result=lambda _, found: aligned.append(found.model), **options)
    plain = ob.merge(models, repair=None, **options)
    found = ob.repair(plain, [models[0], *aligned], [X], ob.symmetry(models[0], X), form=form)
    for key, value in merged.state_dict().items():
        torch.testing.assert_close(value, found.state[key])


def test_repair_is_applied():
    models = [mlp(0), mlp(1)]
    plain = ob.merge(models, example_inputs=X)
    repaired = ob.merge(models, example_inputs=X, repair=[X])
    hidden = [float(m[:2](X).detach().std()) for m in (plain, repaired, *models)]
    goal = (hidden[2] + hidden[3]) / 2
    assert abs(hidden[1] - goal) < abs(hidden[0] - goal)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"models": [mlp()]}, "at least two models, got 1"),
        ({"weights": [1.0]}, "2 models and 1 weights"),
        ({"weights": [1.0, -1.0]}, "a sum other than zero"),
        ({"reference": "last"}, "reference must be 'first', 'mean' or 'common'"),
        ({"example_inputs": None}, "give example_inputs="),
        ({"models": [mlp(), nn.Linear(3, 2)]}, "different architectures"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        ob.merge(**{"models": [mlp(), mlp(1)], "example_inputs": X, **arguments})


def test_networks_without_norms_are_merged_by_their_twins():
    def make(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))

    x = torch.randn(200, 4)
    data = list(zip(x.split(100), (x[:, 0] > 0).long().split(100), strict=True))
    objective = ob.RandomPoint(nn.functional.cross_entropy, low=0.3, high=0.7)
    options = {"method": "weight-matching", "objective": objective, "data": data, "kinds": "positive", "repair": "repair"}
    results, permutations = [], []
    callbacks = {"on_result": lambda _, result: results.append(result), "on_aligned": permutations.extend}
    merged = ob.merge([make(0), make(1)], x[:2], **options, **callbacks)
    assert len(permutations) == 2
    assert set(merged.state_dict()) == set(make(0).state_dict())
    assert any("norm" in key for key in results[0].model.state_dict())
    same = ob.merge([make(0), make(0)], x[:2], **options, scaling=Scaling(steps=0))
    torch.testing.assert_close(same(x), make(0)(x), rtol=0.02, atol=0.02)  # variances of 200 samples, biased or not
    with pytest.raises(ValueError, match="other names"):
        ob.merge([make(0), make(1)], x[:2], **options, groups="0*")
    three = ob.merge([make(0)] * 3, x[:2], **options, reference="mean", scaling=Scaling(steps=0))
    torch.testing.assert_close(three(x), make(0)(x), rtol=0.02, atol=0.02)


def make_gated(seed):
    torch.manual_seed(seed)
    return Gated().eval()


def test_scales_and_bases_of_three_are_learned_at_once():
    torch.manual_seed(0)
    x = torch.randn(120, 6)
    models = [make_gated(seed) for seed in range(3)]
    teacher = models[0](x).argmax(-1)
    objective = ob.RandomPoint(nn.functional.cross_entropy, low=0.4, high=0.6)
    options = {"objective": objective, "data": [(x, teacher)], "kinds": "all", "method": "weight-matching"}

    def cost_of_pairs(reference):
        kept = []
        ob.merge(models, reference=reference, on_aligned=kept.extend, scaling=ob.Scaling(steps=60), **options)
        assert all(isinstance(each, ob.Transform) for each in kept)
        states = [each.apply(ob.canonical(model, x[:2]).state) for each, model in zip(kept, models, strict=True)]
        moved = [copy.deepcopy(model) for model in models]
        total = 0.0
        for number, (model, state) in enumerate(zip(moved, states, strict=True)):
            model.load_state_dict(state)
            torch.testing.assert_close(model(x), models[number](x), rtol=1e-3, atol=1e-4)
            middle = copy.deepcopy(model)
            other = states[(number + 1) % 3]
            middle.load_state_dict({key: (value + other[key]) / 2 for key, value in state.items()})
            total += nn.functional.cross_entropy(middle(x), teacher).item()
        return total

    assert cost_of_pairs("common") < cost_of_pairs("first") - 0.05


def test_layers_may_have_weights_of_their_own():
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)) for _ in range(2))
    x = torch.randn(4, 3)
    aligned = ob.align(second, first, x, method="weight-matching").model.state_dict()
    merged = ob.merge([first, second], x, weights=[1, 0], layer_weights={"2.*": [1, 3]}, method="weight-matching")
    for key, value in merged.state_dict().items():
        share = 0.75 if key.startswith("2.") else 0.0
        torch.testing.assert_close(value, torch.lerp(first.state_dict()[key], aligned[key], share))
    with pytest.raises(ValueError, match="leave out layer_weights="):
        ob.merge([first, second], x, layer_weights={"2.*": [1, 3]}, repair="norms")


def make_transformer(seed, norm=nn.LayerNorm):
    torch.manual_seed(seed)
    return with_gains(Model([Attention(), MLP()], [norm(D) for _ in range(3)])).double().eval()


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
def test_rotated_copies_are_merged_into_one_by_means(norm):
    """Three equal networks in other bases: their mean is one of them, whatever was moved."""
    model, x = make_transformer(0, norm), torch.randn(2, 4, 3, dtype=torch.float64)
    form = ob.canonical(model, x).model
    symmetry = ob.symmetry(form, x, kinds="all")
    models = [form]
    for seed in (1, 2):
        copied = copy.deepcopy(form)
        copied.load_state_dict(ob.Transform.random(symmetry, torch.Generator().manual_seed(seed)).apply(form))
        models.append(copied)
    merged = ob.merge(models, x, method="weight-matching", kinds="all", reference="mean", scaling=Scaling(steps=0))
    torch.testing.assert_close(merged(x), model(x), rtol=1e-6, atol=1e-7)


def test_the_mean_of_many_in_other_bases_is_no_worse_than_the_first():
    """Networks that differ are closer together aligned to means, each computes what it did, and the first moves too."""
    models = [make_transformer(seed, RMSNorm) for seed in range(4)]
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    forms = [ob.canonical(model, x).state for model in models]
    spreads, found = {}, {}
    for reference in ("first", "mean"):
        elements = []
        options = {"method": "weight-matching", "kinds": "all", "scaling": Scaling(steps=0), "max_rounds": 3}
        ob.merge(models, x, **options, reference=reference, on_aligned=elements.extend)
        states = [element.apply(form) for element, form in zip(elements, forms, strict=True)]
        pairs = itertools.combinations(states, 2)
        spreads[reference] = sum(float((a[key] - b[key]).square().sum()) for a, b in pairs for key in a)
        found[reference] = elements
        for state, model in zip(states, models, strict=True):
            moved = copy.deepcopy(model)
            moved.load_state_dict(state)
            torch.testing.assert_close(moved(x), model(x))
    assert spreads["mean"] < 0.99 * spreads["first"]
    assert found["first"][0].is_identity
    assert not found["mean"][0].is_identity


def test_tied_networks_are_merged_untied_if_asked_for():
    torch.manual_seed(0)
    models, x = [with_gains(Tied()).eval() for _ in range(2)], torch.randint(0, 11, (2, 4))
    notes = []
    options = {"method": "weight-matching", "kinds": "all", "scaling": Scaling(steps=0)}
    tied = ob.merge(models, x, **options, on_result=lambda _, result: notes.extend(result.notes))
    assert tied.head.weight is tied.embed.weight
    assert any("give --untie (untie=True in Python), which needs tie_word_embeddings: false" in note for note in notes)
    notes.clear()
    merged = ob.merge(models, x, **options, untie=True, on_result=lambda _, result: notes.extend(result.notes))
    assert merged.head.weight is not merged.embed.weight
    assert any("head.weight has a tensor of its own now" in note for note in notes)
    assert not any("stays" in note for note in notes)
    found = ob.align(models[1], to=models[0], example_inputs=x, **options, untie=True)
    assert {basis.kind for basis in found.transform.symmetry.bases.values()} == {"orthogonal"}
    torch.testing.assert_close(found.model(x), models[1](x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.target(x), models[0](x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", [{"kinds": "positive"}, {}, {"symmetry": "all", "kinds": "all"}])
def test_untying_is_for_models_whose_gains_are_folded(arguments):
    torch.manual_seed(0)
    models, x = [Tied().eval() for _ in range(2)], torch.randint(0, 11, (2, 4))
    if "symmetry" in arguments:
        arguments = {**arguments, "symmetry": ob.symmetry(models[0], x, kinds="all")}
    for call in (
        lambda: ob.merge(models, x, untie=True, **arguments),
        lambda: ob.align(*models, x, untie=True, **arguments),
    ):
        with pytest.raises(ValueError, match=r"untie=True is for kinds='all' without symmetry="):
            call()
