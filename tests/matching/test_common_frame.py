import itertools

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.common_frame import find_common_frame

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))


def make(seed: int, width: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def read(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().double() for key, value in model.named_parameters()}


def gain(states, permutations, shares) -> float:
    """The sum over pairs, by hand."""
    moved = [permutation.apply(state) for permutation, state in zip(permutations, states, strict=True)]
    return sum(
        shares[p] * shares[q] * float((moved[p][key] * moved[q][key]).sum())
        for p, q in itertools.combinations(range(len(states)), 2)
        for key in states[0]
    )


def search(states, symmetry, shares, starts=None):
    starts = starts or [symmetry.identity()] * len(states)
    return find_common_frame(states, symmetry, starts, shares, lambda *_: None)


@pytest.mark.parametrize("shares", [(1 / 3, 1 / 3, 1 / 3), (0.6, 0.3, 0.1)])
def test_all_pairs_together_gain(shares):
    models = [make(seed, 12) for seed in range(3)]
    states, symmetry = [read(model) for model in models], ob.symmetry(models[0], X)
    found = search(states, symmetry, shares)
    assert found[0].is_identity
    first = [symmetry.identity()] + [
        ob.align(model, to=models[0], symmetry=symmetry, method="weight-matching").permutation for model in models[1:]
    ]
    assert gain(states, found, shares) > gain(states, [symmetry.identity()] * 3, shares)
    from_first = search(states, symmetry, shares, first)
    assert gain(states, from_first, shares) >= gain(states, first, shares) - 1e-12


def test_nested_groups():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 2)).eval()
    symmetry = ob.symmetry(model, torch.randn(2, 4, 3))
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        states.append({key: torch.randn_like(value, dtype=torch.float64) for key, value in model.named_parameters()})
    found = search(states, symmetry, [1 / 3] * 3)
    assert gain(states, found, [1 / 3] * 3) > gain(states, [symmetry.identity()] * 3, [1 / 3] * 3)


def test_merging_leaves_groups_that_were_not_named():
    models = [make(seed, 12) for seed in range(3)]
    done = []
    names = list(ob.symmetry(models[0], X).groups)
    ob.merge(models, example_inputs=X, reference="common", groups=names[0], on_aligned=done.extend)
    assert any(not torch.equal(p[names[0]], torch.arange(12)) for p in done[1:])
    assert all(torch.equal(p[names[1]], torch.arange(12)) for p in done)
