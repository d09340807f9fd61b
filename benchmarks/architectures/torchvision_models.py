"""The models of torchvision: classification, segmentation, video and optical flow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.architectures.architecture import Architecture, Example, images
from onebasin.cli.torchvision_operators import declare_missing_operators

# A group is a hidden width that no shortcut ties to another; an attention has heads, query-key units and value units.
_COUNTED = {
    "alexnet": 5 + 2,  # convolutions, fully connected
    "vgg16": 13 + 2,
    "resnet18": 1 + 3 + 8,  # stem with stage 1, stages 2-4, inside of 8 blocks
    "resnet50": 1 + 4 + 16 * 2,
    "densenet121": 1 + 58 * 2 + 3,  # stem, two a dense layer, transitions
    "mobilenet_v2": 1 + 16 + 7 + 1,  # stem (first block's depthwise too), expansions, residual widths, last
    "convnext_tiny": 4 + 18,  # stages, inside of 18 blocks
    "vit_b_16": 1 + 12 * 4,  # stream; heads, query-key units, value units and the inside of the MLP in each block
    "swin_t": 4 + 12 * 4,  # four streams, twelve blocks of the same four
}
_SIZES = {"inception_v3": 96, "googlenet": 64, "alexnet": 64, "maxvit_t": 224}
_LARGE = {
    "regnet_y_128gf": "645M parameters; the other regnets are the same code",
    "vit_h_14": "632M parameters; vit_l_16 is the same code",
}


def torchvision_architectures() -> Iterator[Architecture]:
    """Every classification model."""
    declare_missing_operators()
    from torchvision import models

    for name in models.list_models(module=models):
        yield Architecture(
            "torchvision",
            name,
            lambda name=name: _make_classifier(name),
            counted=_COUNTED.get(name),
            unverified=_LARGE.get(name, ""),
        )


def torchvision_task_architectures() -> Iterator[Architecture]:
    """Segmentation, video and optical flow.

    The detectors choose boxes by their values, and are left out; so is MViT, which takes videos of one large size alone.
    """
    declare_missing_operators()
    from torchvision import models

    for name in models.list_models(module=models.segmentation):
        yield Architecture("torchvision", name, lambda name=name: _make_segmentation(name))
    for name in models.list_models(module=models.video, exclude="mvit*"):
        yield Architecture("torchvision", name, lambda name=name: _make_video(name))
    for name in models.list_models(module=models.optical_flow):
        yield Architecture("torchvision", name, lambda name=name: _make_flow(name))


def _make_classifier(name: str) -> Example:
    from torchvision import models

    options: dict[str, Any] = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    size = _SIZES.get(name, 32)
    if name.startswith("vit"):
        size = 2 * int(name.rpartition("_")[2])
        options["image_size"] = size
    return Example(models.get_model(name, weights=None, **options), images(), size, (size + 32,))


def _make_segmentation(name: str) -> Example:
    from torchvision import models

    return Example(models.get_model(name, weights=None, weights_backbone=None), images(), 32, (64,))


def _make_video(name: str) -> Example:
    from torchvision import models

    model = models.get_model(name, weights=None)
    return Example(model, lambda batch, length: torch.randn(batch, 3, 8, length, length), 32, (64,))


def _make_flow(name: str) -> Example:
    from torchvision import models

    model = models.get_model(name, weights=None)
    return Example(model, lambda batch, length: tuple(torch.randn(2, batch, 3, length, length)), 128, (136,))
