"""Several models moved into one frame of reference."""

import copy
import itertools

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.scaling import Scaling
from tests.basis_networks import MLP, Attention, D, Gated, Model, RMSNorm, Tied, with_gains
from tests.matching.test_merging import X, mlp


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


def test_tied_networks_are_learned_at_once():
    """PyTorch refuses to run a network on a state in which tied keys are several tensors."""
    torch.manual_seed(0)
    models = [Tied().eval() for _ in range(3)]
    data = [(ids, models[0](ids).detach()) for ids in torch.randint(0, 11, (2, 8, 4))]
    options = {"objective": ob.RandomPoint(nn.functional.mse_loss), "data": data, "scaling": ob.Scaling(steps=2)}
    for kinds in ("positive", "all"):
        merged = ob.merge(models, kinds=kinds, method="weight-matching", reference="common", **options)
        assert merged.head.weight is merged.embed.weight


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
