"""Pairs of units that a rotary embedding turns together; what is found in which network is in `test_bases`."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.symmetries.layout import write
from tests.basis_networks import Attention, D, Model, PackedAttention

X = torch.randn(2, 4, 3)


def find(block: nn.Module) -> ob.Symmetry:
    torch.manual_seed(0)
    return ob.symmetry(Model([block], [nn.LayerNorm(D), nn.LayerNorm(D)]).eval(), X, kinds="all")


def rotary(symmetry: ob.Symmetry) -> ob.Basis:
    (found,) = (basis for basis in symmetry.bases.values() if basis.is_rotary)
    return found


def test_units_are_named_in_layouts_and_are_no_group():
    symmetry = find(Attention(rotate="halves"))
    basis = rotary(symmetry)
    assert basis.name == "branches.0.q.weight"
    assert basis.group not in symmetry.groups
    assert symmetry.sizes[basis.group] == 2
    heads, angle = basis.parents
    assert write(symmetry.layouts["branches.0.q.weight"][:1]) == f"({heads} {basis.group} {angle})"
    neighbours = rotary(find(Attention(rotate="interleaved")))
    assert write(find(Attention(rotate="interleaved")).layouts["branches.0.k.bias"]) == (
        f"({heads} {neighbours.parents[1]} {neighbours.group})"
    )


def test_queries_take_the_matrix_and_keys_its_dual():
    places = rotary(find(Attention(rotate="halves"))).places
    assert {key.split(".")[2]: place.is_dual for key, (place,) in places.items()} == {"q": False, "k": True}
    (packed,) = set(rotary(find(PackedAttention())).places.values())
    assert [place.is_dual for place in packed] == [False, True]


def test_heads_of_queries_share_the_pairs_of_their_keys():
    symmetry = find(Attention(kv_heads=1, rotate="halves"))
    assert rotary(symmetry).parents == ("branches.0.q.weight:angle",)


def test_activations_that_may_be_turned_are_not_compared():
    symmetry = find(Attention(rotate="halves"))
    assert not any(site.module.endswith((".q", ".k")) for sites in symmetry.sites.values() for site in sites)
    symmetry = find(Attention())
    assert any(site.module.endswith(".q") for sites in symmetry.sites.values() for site in sites)


@pytest.mark.parametrize("style", ["halves", "interleaved", "not in pairs"])
@pytest.mark.parametrize("is_large", [False, True])
def test_one_token_does_not_tell_how_units_are_paired(style, is_large, monkeypatch):
    if is_large:
        monkeypatch.setattr("onebasin.tracing.MAX_ENTRIES", 0)
        monkeypatch.setattr("onebasin.tracing.bases.rotary.MAX_ENTRIES", 0)
    torch.manual_seed(0)
    model = Model([Attention(rotate=style)], [nn.LayerNorm(D), nn.LayerNorm(D)]).eval().double()
    symmetry = ob.symmetry(model, torch.randn(1, 1, 3), kinds="all")
    assert any(basis.is_rotary for basis in symmetry.bases.values()) == (style != "not in pairs")
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    moved = ob.Transform.random(symmetry, torch.Generator().manual_seed(0)).apply(model)
    torch.testing.assert_close(torch.func.functional_call(model, moved, x), model(x), rtol=1e-9, atol=1e-11)


class OneKey(nn.Module):
    """Positions are given, so that no size is read: all that can be known is one position."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x, cos, sin):
        def turn(x):
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        return self.head((turn(self.q(x)) @ turn(self.k(x)).mT).softmax(-1) @ self.v(x))


def test_a_single_key_in_all_calls_is_not_enough():
    model, angles = OneKey().eval(), torch.rand(1, 1, 4)
    symmetry = ob.symmetry(model, (torch.randn(1, 1, 3), angles.cos(), angles.sin()), kinds="all")
    assert not any(basis.is_rotary for basis in symmetry.bases.values())


def test_a_transform_with_pairs_is_saved(tmp_path):
    symmetry = find(Attention(rotate="halves"))
    transform = ob.Transform.random(symmetry, torch.Generator().manual_seed(0))
    transform.save(tmp_path / "t.safetensors")
    loaded = ob.Transform.load(tmp_path / "t.safetensors")
    assert loaded.symmetry.bases == symmetry.bases
    assert (loaded.inverse() @ transform).permutation.is_identity
    torch.testing.assert_close(loaded.matrices, transform.matrices)


def test_a_model_without_values_has_none():
    with torch.device("meta"):
        model = Model([Attention(rotate="halves")], [nn.LayerNorm(D), nn.LayerNorm(D)]).eval()
    symmetry = ob.symmetry(model, X.to("meta"), kinds="all")
    assert not any(basis.is_rotary for basis in symmetry.bases.values())


def test_the_kind_of_pairs_is_named():
    """They are no group, because they cannot be permuted."""
    model = Model([Attention(rotate="halves")], [nn.LayerNorm(D) for _ in range(2)]).eval()
    symmetry = ob.symmetry(model, torch.randn(2, 4, 3), kinds="all")
    assert "3 changes of basis (1 centred, 1 linear, 1 rotary)" in symmetry.summary()
    (pairs,) = (basis for basis in symmetry.bases.values() if basis.is_rotary)
    assert (symmetry.sizes[pairs.group], pairs.group in symmetry.groups) == (2, False)
    assert any(pairs.name in line and "rotary" in line for line in str(symmetry).splitlines())
