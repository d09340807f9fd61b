"""A structure fits a model or says what does not."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.symmetries.structure import Pin


def test_sizes_are_learned_from_a_model():
    symmetry = ob.Symmetry.from_axes({"0.weight": "h i", "0.bias": "h", "2.weight": "o (h 1)"}, free=["h"])
    assert symmetry.sizes == {"h": 0, "i": 0, "o": 0}
    bound = symmetry.bind(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert bound.groups["h"].size == 4
    assert bound.layouts.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    with pytest.raises(ValueError, match="the sizes of h, i, o are not known yet"):
        symmetry.identity()


@pytest.mark.parametrize(
    ("axes", "free", "message"),
    [
        ({"w": "h i"}, ["x"], "'x' does not occur in any axis"),
        ({"w": "h i"}, ["d[h]"], "'d' does not occur in any axis"),
        ({"w": "h (d e)"}, ["h", "d[h]", "e[d]"], r"e\[d\] must name the parents of 'd' before it"),
        ({"w": "d i", "v": "h"}, ["h", "d[h]"], "depends on 'h', which must stand beside it"),
        ({"w": "h i"}, ["3"], "cannot read the free name '3'"),
    ],
)
def test_contradictions_are_refused(axes, free, message):
    with pytest.raises(ValueError, match=message):
        ob.Symmetry.from_axes(axes, free)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w": torch.zeros(3, 2)}, "the state has no 'v', which the symmetry expects"),
        ({"w": torch.zeros(4, 2), "v": torch.zeros(3)}, r"'w' has shape \(4, 2\), the symmetry expects \(3, 2\)"),
        (
            {"w": torch.zeros(3, 2), "v": torch.zeros(3), "u": torch.zeros(1)},
            "the state has 'u', which the symmetry does not",
        ),
    ],
)
def test_other_models_are_refused(state, message):
    symmetry = ob.Symmetry.from_axes({"w": "h i", "v": "h"}, ["h"], {"w": torch.zeros(3, 2), "v": torch.zeros(3)})
    with pytest.raises(ValueError, match=message):
        symmetry.bind(state)


def test_a_pin_says_where():
    assert str(Pin("model output", "output")) == "model output (output)"
    assert str(Pin("an index selects along it", "embedding", "wte")) == "an index selects along it (embedding in wte)"


def test_notebooks_and_terminals_show_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    symmetry = ob.symmetry(model, torch.zeros(1, 3))
    assert repr(symmetry) == "Symmetry(1 group; 4 of 4 hidden units free (100.0%))"
    page = symmetry._repr_html_()
    assert page.count("<table>") == 2
    assert "<td>0.weight</td>" in page


def test_groups_have_kinds():
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model, x = nn.Sequential(nn.Linear(3, 8), block, nn.LayerNorm(8), nn.Linear(8, 2)).eval(), torch.randn(2, 5, 3)
    plain, found = (ob.symmetry(model, x, kinds=kinds) for kinds in ("permutation", "all"))
    assert {group.kind for group in plain.groups.values()} == {"permutation"}
    kinds = {name: group.kind for name, group in found.groups.items()}
    assert kinds["0.weight"] == "centred"
    assert kinds["1.linear1"] == "positive"
    assert kinds["1.self_attn:2"] == "linear"
    assert kinds["1.self_attn"] == "permutation"
    assert found.groups == plain.groups
    assert {group.kind for group in replace(found, bases={}, scales={}).groups.values()} == {"permutation"}
    signs = ob.symmetry(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), x, kinds="all")
    assert signs.groups["0.weight"].kind == "signed"
    assert ob.Transform.random(signs).permutation.symmetry is signs
