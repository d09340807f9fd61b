"""Random programs, walked without verification: no permutation that is found changes what the program returns."""

import pytest
import torch
from torch.nn import functional as F

import onebasin as ob
from tests.random_operations import MORE_MAKERS, PACKED_MAKERS
from tests.random_programs import MAKERS, RandomProgram, measure

pytestmark = pytest.mark.filterwarnings("ignore::onebasin.UnreachedWarning")


class Transforms:
    """Random elements of a symmetry with scales and bases."""

    def __init__(self, symmetry):
        self.symmetry = symmetry

    def random(self, generator):
        return ob.Transform.random(self.symmetry, generator)


def check(seeds, makers=MAKERS):
    num_groups = num_nested = 0
    for seed in seeds:
        model = RandomProgram(seed, makers=makers)
        symmetry = ob.symmetry(model, model.draw_input(), verify=False)
        error = measure(model, symmetry)
        assert error < 1e-9, f"seed {seed} is wrong by {error}:\n" + "\n".join(model.lines) + f"\n{symmetry}"
        num_groups += len(symmetry.groups)
        num_nested += sum(bool(group.parents) for group in symmetry.groups.values())
    assert num_groups > len(seeds), "the programs have too little symmetry to test anything"
    assert num_nested > len(seeds) // 4


def test_random_programs():
    check(range(150))


def test_random_programs_of_more_operations():
    check(range(80), MORE_MAKERS)


def test_random_programs_with_packed_weights():
    check(range(100), PACKED_MAKERS)


def test_programs_that_were_wrong_once():
    """Seeds that found a mistake in a rule."""
    check(
        [3, 7, 84, 132, 143, 280, 1626, 1726, 2256, 2303, 2304, 2473, 2671, 2894, 3675, 3836, 4129, 4144, 4264, 5267, 7499]
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_programs(block):
    check(range(10_000 + 500 * block, 10_500 + 500 * block))
    check(range(20_000 + 500 * block, 20_500 + 500 * block), MORE_MAKERS)
    check(range(30_000 + 500 * block, 30_500 + 500 * block), PACKED_MAKERS)


def test_random_programs_with_scales(monkeypatch):
    """The same with ReLU in place of tanh, which leaves positive scales: no transform changes what the program returns."""
    monkeypatch.setattr(torch.Tensor, "tanh", torch.Tensor.relu)
    num_scales = 0
    for makers in (MORE_MAKERS, PACKED_MAKERS):
        for seed in range(40):
            model = RandomProgram(seed, makers=makers)
            symmetry = ob.symmetry(model, model.draw_input(), verify=False, kinds="positive")
            error = measure(model, Transforms(symmetry))
            assert error < 1e-9, f"seed {seed} is wrong by {error}:\n" + "\n".join(model.lines) + f"\n{symmetry}"
            num_scales += len(symmetry.scales)
    assert num_scales > 40


@pytest.mark.parametrize(
    "between", [lambda x: x * 1.0, lambda x: F.rms_norm(x, x.shape[-1:]), lambda x: F.layer_norm(x, x.shape[-1:])]
)
def test_random_programs_with_bases(between, monkeypatch):
    """The same with what keeps changes of basis in place of tanh."""
    monkeypatch.setattr(torch.Tensor, "tanh", lambda x: between(x) if x.dim() else x)
    num_bases = 0
    for makers in (MAKERS, PACKED_MAKERS):
        for seed in range(25):
            model = RandomProgram(seed, makers=makers)
            symmetry = ob.symmetry(model, model.draw_input(), verify=False, kinds="all")
            error = measure(model, Transforms(symmetry))
            assert error < 1e-8, f"seed {seed} is wrong by {error}:\n" + "\n".join(model.lines) + f"\n{symmetry}"
            num_bases += len(symmetry.bases)
    assert num_bases > 10


def test_a_wrong_permutation_is_noticed():
    model = RandomProgram(84)
    claimed = ob.Symmetry.from_axes({"weights.4": "h i j"}, free=["h", "i", "j"], model=model)
    assert measure(model, claimed) > 1e-3
    assert torch.is_tensor(model(model.draw_input())[0])
