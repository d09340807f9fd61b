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


def test_an_imitation_that_cannot_be_is_refused():
    torch.manual_seed(0)
    old, new = mlp(), mlp()
    with pytest.raises(ValueError, match="scales and changes of basis"):
        ob.port(change(old), base=old, to=new, example_inputs=X, imitation=ob.Imitation([X]))
    states = [model.state_dict() for model in (change(old), old, new)]
    symmetry = ob.symmetry(old, X, kinds="positive")
    with pytest.raises(TypeError, match="give modules"):
        ob.port(*states, symmetry=symmetry, imitation=ob.Imitation([X]))
    with pytest.raises(TypeError, match="read once"):
        ob.Imitation(iter([X]))
    with pytest.raises(ValueError, match="steps"):
        ob.Imitation([X], steps=-1)


def test_the_distance_of_scores_is_lowest_at_the_same_distribution():
    wanted = torch.randn(3, 5, 7)
    least = float(soft_cross_entropy(wanted + 2.0, wanted))  # a constant changes no distribution
    assert least == pytest.approx(float(-(wanted.softmax(-1) * wanted.log_softmax(-1)).sum(-1).mean()), rel=1e-5)
    assert float(soft_cross_entropy(wanted + torch.randn(3, 5, 7), wanted)) > least
