"""Rows that are sorted by expert: units inside experts move, and experts move only if the sorting is known."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onebasin as ob
from tests.cases import Fn, weight, written


def test_grouped_products_of_a_language_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_local_experts": 5},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False},
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    inputs: dict[str, Tensor] = {"input_ids": torch.arange(12).view(2, 6) + 3}
    found = written(Fn(lambda self, **given: self.model(**given).logits, model=model), inputs)
    assert {"5", "12[5]", "16"} <= set(found)


def test_offsets_from_outside_fix_the_experts_whose_units_move_alike():
    def forward(self, x, offsets):
        hidden = F.grouped_mm(x, self.up, offs=offsets)
        return F.grouped_mm(torch.tanh(hidden), self.down, offs=offsets)

    torch.manual_seed(0)
    model = Fn(forward, up=weight(3, 16, 8), down=weight(3, 8, 16)).bfloat16()  # the type it takes on a CPU
    symmetry = ob.symmetry(model, (torch.randn(6, 16).bfloat16(), torch.tensor([1, 4, 6], dtype=torch.int32)), verify=False)
    assert "offsets say which rows are whose" in str(symmetry.pinned["up", 0])
    assert [(group.size, group.parents) for group in symmetry.groups.values()] == [(8, ())]


def test_equal_rows_go_to_different_experts():
    def forward(self, x, offsets):
        hidden = F.grouped_mm(x.expand(6, 16).contiguous(), self.up, offs=offsets)
        return (hidden * self.gate[:, None]).sum(0)

    torch.manual_seed(0)
    model = Fn(forward, up=weight(3, 16, 8), gate=weight(6)).bfloat16()
    inputs = torch.randn(1, 16).bfloat16(), torch.tensor([1, 4, 6], dtype=torch.int32)
    assert not ob.symmetry(model, inputs, verify=False).groups
