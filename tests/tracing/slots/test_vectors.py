"""Vectors of the state are followed through copies and sums with numbers."""

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.programs.calls import read_calls
from onebasin.programs.frontends import read_program
from onebasin.tensors.states import find_ties
from onebasin.tracing.slots.vectors import find_vectors
from onebasin.tracing.trace import Trace
from onebasin.tracing.walk import walk

D = 8


class Scaled(nn.Module):
    """A norm whose output is multiplied by a function of a vector."""

    def __init__(self, gain, also=None):
        super().__init__()
        self.first, self.weight, self.second = nn.Linear(3, D), nn.Parameter(torch.zeros(D)), nn.Linear(D, 2)
        self.gain, self.also = gain, also

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain(self.weight)
        return self.second(x if self.also is None else self.also(x, self.weight))


def offsets_of(model: nn.Module) -> dict[str, float]:
    trace = Trace(find_ties(model))
    for call in read_calls(torch.randn(4, 3)):
        walk(read_program(model, call), trace)
    return dict(find_vectors(trace).offsets)


@pytest.mark.parametrize(("gain", "expected"), [
    (lambda w: 1 + w, 1.0),
    (lambda w: w + 0.5 + 0.25, 0.75),
    (lambda w: (w.double() + 1).float(), 1.0),
    (lambda w: torch.add(w, 1, alpha=2), None),
    (lambda w: 1 - w, None),
    (lambda w: w.exp(), None),
    (lambda w: w + w, None),
    (lambda w: w, None),
])  # fmt: skip
def test_what_is_added_to_a_vector_wherever_it_is_read(gain, expected):
    assert offsets_of(Scaled(gain)) == ({} if expected is None else {"weight": expected})


def test_a_vector_that_is_also_read_otherwise_has_no_offset():
    assert offsets_of(Scaled(lambda w: 1 + w, lambda x, w: x + w)) == {}
    assert offsets_of(Scaled(lambda w: 1 + w, lambda x, w: x * (2 + w))) == {}
    assert offsets_of(Scaled(lambda w: 1 + w, lambda x, w: x * (1 + w))) == {"weight": 1.0}


@pytest.mark.parametrize(("gain", "neutral"), [
    (lambda w: 1 + w, 0.0),
    (lambda w: w - 0.0 + 0.25, None),
    (lambda w: w, 1.0),
    (lambda w: w.exp(), None),
    (lambda w: torch.sigmoid(w) + 1, None),
])  # fmt: skip
def test_gains_have_the_number_at_which_they_are_one(gain, neutral):
    """Functions of a vector are gains too, of which it is not known where they are one."""
    torch.manual_seed(0)
    model, x = Scaled(gain), torch.randn(4, 3)
    nn.init.uniform_(model.weight, 0.5, 1.5)
    assert ob.symmetry(model, x, kinds="all").gains == {"weight": neutral}


def test_a_sum_is_scaled_and_not_the_vector_itself():
    """Verified on random weights; and the scale is exact on these."""
    torch.manual_seed(0)
    model, x = Scaled(lambda w: 1 + w).double(), torch.randn(4, 3, dtype=torch.float64)
    nn.init.normal_(model.weight)
    symmetry = ob.symmetry(model, x, kinds="positive")
    (scale,) = symmetry.scales.values()
    assert scale.offsets == {"weight": 1.0}
    transform = ob.Transform.random(symmetry)
    torch.testing.assert_close(torch.func.functional_call(model, transform.apply(model), x), model(x))
    assert not torch.allclose(transform.apply(model)["weight"], model.weight)


def test_a_stream_is_rotated_where_the_sum_is_one():
    model, x = Scaled(lambda w: 1 + w), torch.randn(4, 3)
    symmetry = ob.symmetry(model, x, kinds="all")
    assert symmetry.fixed == {"weight": 0.0}
    assert [basis.kind for basis in symmetry.bases.values()] == ["orthogonal"]
    for bad in (Scaled(lambda w: 1 + w, lambda x, w: x + w), Scaled(lambda w: 1 + w)):
        if bad.also is None:
            nn.init.ones_(bad.weight)  # the gain is two: uniform, but taken for one that may be anything
        symmetry = ob.symmetry(bad, x, kinds="all")
        assert "orthogonal" not in {basis.kind for basis in symmetry.bases.values()}
