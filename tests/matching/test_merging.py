import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.scaling import Scaling
from tests.basis_networks import Tied, with_gains

X = torch.randn(128, 3, generator=torch.Generator().manual_seed(0))


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))


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
    models = [mlp(seed) for seed in range(2)]
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
    numbers = []
    given = {"reference": "mean", "max_rounds": 0, "on_result": lambda number, _: numbers.append(number)}
    ob.merge([make(seed) for seed in range(3)], x[:2], **options, **given, scaling=Scaling(steps=0))
    assert numbers == [1, 2], "no rounds: every model is aligned once, to the first"


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
