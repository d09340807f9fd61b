import torch
from torch import nn

import onebasin as ob
from onebasin.symmetries.describe import merge_layers, summarise


class Deep(nn.Module):
    """Three residual blocks that differ in nothing but their number."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_layers_that_are_alike_are_one_row():
    symmetry = ob.symmetry(Deep(), torch.zeros(1, 4))
    rows = {name: (count, group.size, axes) for name, count, group, axes in summarise(symmetry)}
    assert rows["blocks.*.0"] == (3, 8, ["blocks.*.0.weight[0]", "blocks.*.0.bias[0]", "blocks.*.2.weight[1]"])
    count, size, axes = rows["stem"]
    assert (count, size) == (1, 6)
    assert "blocks.*.2.weight[0] x3" in axes
    assert "head.weight[1]" in axes
    assert sum(count for count, _, _ in rows.values()) == len(symmetry.groups)


def test_only_numbers_of_layers_are_merged():
    assert merge_layers(["a.0.w[0]", "a.1.w[0]", "a.1.w[1]", "conv2.w"]) == ["a.*.w[0] x2", "a.1.w[1]", "conv2.w"]


def test_scales_have_a_table():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    text = str(ob.symmetry(model, torch.rand(2, 4), kinds="positive"))
    assert "1 positive scale;" in text
    assert "0.weight  0.weight  0.weight[0], 0.bias[0], 2.weight[1] to the power -1" in text


def test_bases_have_a_table():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    text = str(ob.symmetry(model, torch.zeros(1, 4), kinds="all"))
    assert "0.weight[0], 0.bias[0], 1.weight[1] by the dual" in text
    assert "1 change of basis" in text
    assert "basis" not in str(ob.symmetry(model, torch.zeros(1, 4)))
