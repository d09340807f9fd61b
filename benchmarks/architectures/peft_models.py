"""Adapters of PEFT on a small MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.architectures.architecture import Architecture, Example, NotMade
from onebasin.cli.torchvision_operators import declare_missing_operators

_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True}),
    "LoHa": ("LoHaConfig", {"r": 4}),
    "LoKr": ("LoKrConfig", {"r": 4}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 4}),
    "VeRA": ("VeraConfig", {"r": 4}),
}


def peft_architectures() -> Iterator[Architecture]:
    """An adapter of each kind."""
    declare_missing_operators()
    for name in _METHODS:
        yield Architecture("PEFT", name, lambda name=name: _make(name))


def _make(name: str) -> Example:
    import peft

    class_name, options = _METHODS[name]
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    try:
        model = peft.get_peft_model(network, getattr(peft, class_name)(target_modules=["0", "2"], **options))
        with torch.no_grad():
            model(torch.randn(2, 8))
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {error}") from error
    return Example(model, lambda batch, length: torch.randn(batch, 8), 1)
