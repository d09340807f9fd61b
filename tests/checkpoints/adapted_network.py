"""A small network and a LoRA on each of its weights."""

import torch
from torch import nn

import onebasin as ob


class Network(nn.Module):
    """A linear layer, a convolution and an embedding, all hidden."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.first = nn.Linear(6, 8)
        self.conv = nn.Conv1d(8, 7, 1)
        self.last = nn.Linear(7, 2)

    def forward(self, x):
        x = torch.tanh(self.first(torch.tanh(self.embed(x))))
        return self.last(torch.tanh(self.conv(x.transpose(1, 2))).transpose(1, 2))


TOKENS = torch.tensor([[0, 1, 2, 3, 4]])


def adapted(seed: int = 0):
    """A network, its symmetry, a permutation, a LoRA on every weight, and the network with the LoRA merged in."""
    torch.manual_seed(seed)
    model = Network()
    symmetry = ob.symmetry(model, TOKENS)
    lora, merged = {}, dict(model.state_dict())
    for name in ("first", "conv", "last"):
        weight = merged[f"{name}.weight"]
        a, b = torch.randn(3, *weight.shape[1:]), torch.randn(weight.shape[0], 3, *[1] * (weight.dim() - 2))
        lora |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        merged[f"{name}.weight"] = weight + (b.flatten(1) @ a.flatten(1)).view(weight.shape)
    a, b = torch.randn(3, 5), torch.randn(6, 3)
    lora |= {"base_model.model.embed.lora_embedding_A": a, "base_model.model.embed.lora_embedding_B": b}
    merged["embed.weight"] = merged["embed.weight"] + (b @ a).T
    return model, symmetry, symmetry.random(torch.Generator().manual_seed(seed)), lora, merged
