"""What canonical forms are found from: vectors count, and matrices are shared and never read."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.skeletons import Skeleton, check_fits, copy_structure
from onebasin.tensors.states import find_ties, read_state
from tests.basis_networks import MLP, Attention, D, Model, Tied, with_gains


def make() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return with_gains(Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(3)])).eval(), torch.randn(2, 4, 3)


def test_a_copy_of_the_structure_shares_tensors_and_keeps_ties():
    model = Tied().eval()
    copied = copy_structure(model, {id(model.norm.weight): torch.full((D,), 3.0)})
    assert copied is not model
    assert copied.embed.weight is model.embed.weight
    assert find_ties(copied) == find_ties(model)
    assert copied.norm.weight.tolist() == [3.0] * D
    assert model.norm.weight.tolist() == [1.0] * D
    assert not copied.training


def test_a_symmetry_is_traced_with_the_constants_of_a_state():
    """Whatever the module's own vectors are; once for the same constants."""
    model, x = make()
    skeleton = Skeleton(model, x)
    state = {**read_state(model), **{f"norms.{n}.weight": torch.ones(D) for n in range(3)}}
    constants = skeleton.find_constants(state)
    assert [key for key, number in constants.items() if number == 1.0] == [f"norms.{n}.weight" for n in range(3)]
    found = skeleton.trace(constants)
    assert {basis.kind for basis in found.bases.values()} == {"centred", "linear"}
    assert skeleton.trace(constants) is found
    assert "centred" not in {basis.kind for basis in skeleton.trace({}).bases.values()}
    assert not torch.equal(model.norms[0].weight, torch.ones(D))
    model.load_state_dict(state)
    assert "centred" not in {basis.kind for basis in Skeleton(model, x).trace({}).bases.values()}
    assert bool((model.norms[0].weight == 1).all())
    assert found.bases == ob.symmetry(model, x, kinds="all").bases


def test_functions_take_floating_inputs_at_several_values():
    model, x = make()
    (function,) = Skeleton(model, x).functions
    outputs = function(read_state(model))
    assert len(outputs) == 4
    assert not torch.equal(outputs[0], outputs[1])
    (function,) = Skeleton(Tied().eval(), torch.zeros(2, 4, dtype=torch.long)).functions
    assert len(function(read_state(Tied()))) == 1


def test_states_of_other_architectures_are_refused():
    model, _ = make()
    state = read_state(model)
    check_fits(state, model)
    with pytest.raises(ValueError, match="module= has no 'more'"):
        check_fits(type(state)({**state, "more": torch.ones(1)}), model)
    with pytest.raises(ValueError, match=r"embed\.weight' has shape \(8, 4\) in the state and \(8, 3\) in module="):
        check_fits(type(state)({**state, "embed.weight": torch.ones(8, 4)}), model)
