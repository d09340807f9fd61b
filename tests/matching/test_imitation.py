"""A port that imitates its fine-tune: closer to it on inputs that were not seen, by an element of the symmetry."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.imitation import soft_cross_entropy
from tests.basis_networks import MLP, Attention, D, Model
from tests.matching.test_porting import X, change, mlp


def test_an_imitation_brings_the_port_closer_to_the_fine_tune():
    torch.manual_seed(0)
    old, new = (Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(3)]).eval() for _ in range(2))
    fine = change(old)
    inputs = [torch.randn(16, 5, 3) for _ in range(8)]
    options = {"example_inputs": inputs[0][:2], "kinds": "all", "method": "weight-matching", "scaling": ob.Scaling(steps=0)}
    plain = ob.port(fine, base=old, to=new, **options)

    def distance(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (output - wanted).square().mean()

    imitation = ob.Imitation(inputs, steps=60, lr=0.01, distance=distance)
    learned = ob.port(fine, base=old, to=new, imitation=imitation, **options)
    held_out = torch.randn(64, 5, 3)
    with torch.no_grad():
        before, after = (float(distance(each.model(held_out), fine(held_out))) for each in (plain, learned))
    assert after < 0.9 * before
    # What was learned is an element of the symmetry: the moved base computes what the base does.
    torch.testing.assert_close(learned.alignment.model(held_out), old(held_out), rtol=1e-3, atol=1e-3)
    assert learned.alignment.permutation == plain.alignment.permutation
    assert "learned further" in learned.alignment.notes[-1]


def test_an_imitation_that_cannot_be_is_refused_before_any_work(monkeypatch):
    torch.manual_seed(0)
    old, new = mlp(), mlp()
    monkeypatch.setattr("onebasin.matching.porting.align", lambda *_, **__: pytest.fail("aligned"))

    def port(imitation, **options):
        kinds = options.pop("kinds", "positive")
        ob.port(change(old), base=old, to=new, example_inputs=X, kinds=kinds, imitation=imitation, **options)

    with pytest.raises(ValueError, match="scales and changes of basis"):
        port(ob.Imitation([X]), kinds="permutation")
    with pytest.raises(ValueError, match="for one scale"):
        port(ob.Imitation([X]), groups=["0.weight"])
    with pytest.raises(ValueError, match="cannot be compared on the data"):
        port(ob.Imitation([torch.zeros(2, 5)]))
    with pytest.raises(ValueError, match="finite scalar"):
        port(ob.Imitation([torch.full_like(X, torch.nan)]))
    with pytest.raises(ValueError, match="finite scalar"):
        port(ob.Imitation([X], distance=lambda output, wanted: output - wanted))
    with pytest.raises(TypeError, match="must be an Imitation"):
        port([X])
    states = [model.state_dict() for model in (change(old), old, new)]
    symmetry = ob.symmetry(old, X, kinds="positive")
    with pytest.raises(TypeError, match="give modules"):
        ob.port(*states, symmetry=symmetry, imitation=ob.Imitation([X]))
    with pytest.raises(TypeError, match="read once"):
        ob.Imitation(iter([X]))
    with pytest.raises(ValueError, match="steps"):
        ob.Imitation([X], steps=-1)
    with pytest.raises(TypeError, match="distance"):
        ob.Imitation([X], distance=3)  # type: ignore[arg-type]


class Once:
    """Data that is empty when it is read again."""

    def __init__(self, *passes: int):
        self._left = iter(passes)

    def __iter__(self):
        return iter([X] * next(self._left, 0))


def test_data_that_runs_dry_is_refused():
    torch.manual_seed(0)
    old = mlp()
    imitation = ob.Imitation(Once(1, 1, 1, 2), steps=9)
    with pytest.raises(ValueError, match="read once only"):
        ob.port(change(old), base=old, to=mlp(), example_inputs=X, kinds="positive", imitation=imitation)


def test_half_precision_and_a_scale():
    torch.manual_seed(0)
    old, new = (mlp().to(torch.bfloat16) for _ in range(2))
    x, tuned = X.to(torch.bfloat16), change(old)
    imitation = ob.Imitation([x], steps=20, lr=0.05)
    options = {"base": old, "to": new, "example_inputs": x, "kinds": "positive", "imitation": imitation}
    found = [ob.port(tuned, scale=scale, **options) for scale in (1.0, 0.25)]
    assert found[0].model[0].weight.dtype == torch.bfloat16
    first, second = (each.alignment.scales["2.weight"] for each in found)
    assert not torch.allclose(first, second, atol=1e-3)  # each is learned for its scale


def test_gains_that_only_the_fine_tune_changed_are_followed():
    torch.manual_seed(0)
    old, new = (Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(3)]).eval().double() for _ in range(2))
    twin = ob.symmetry(new, (x := torch.randn(2, 5, 3).double()), kinds="all")
    new.load_state_dict(ob.Transform.random(twin, torch.Generator().manual_seed(0)).apply(ob.canonical(old, x).state))
    tuned = change(old)
    found = ob.port(tuned, base=old, to=new, example_inputs=x, kinds="all", scaling=ob.Scaling(steps=0))
    torch.testing.assert_close(found.model(x), tuned(x), rtol=1e-6, atol=1e-6)


def test_the_distance_of_scores_is_lowest_at_the_same_distribution():
    wanted = torch.randn(3, 5, 7)
    least = float(soft_cross_entropy(wanted + 2.0, wanted))  # a constant changes no distribution
    assert least == pytest.approx(float(-(wanted.softmax(-1) * wanted.log_softmax(-1)).sum(-1).mean()), rel=1e-5)
    assert float(soft_cross_entropy(wanted + torch.randn(3, 5, 7), wanted)) > least
    with pytest.raises(ValueError, match="distance="):
        soft_cross_entropy(torch.randn(3, 1), torch.randn(3, 1))
