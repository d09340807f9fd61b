"""Digits that come with the package."""

from __future__ import annotations

from importlib import resources
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Split = Literal["train", "test"]

# Within each class, in the order of the file, the last of every five images is for testing.
_TEST_EVERY = 5


def digits(split: Split = "train") -> tuple[Tensor, Tensor]:
    """Handwritten digits of 8 x 8 pixels: 1,442 for training, 355 for testing.

    scikit-learn's copy of the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI
    Machine Learning Repository, doi.org/10.24432/C50P49, CC BY 4.0). The split is fixed and stratified: within each class
    every fifth image is for testing. The same people wrote both parts.

    Returns:
        Images (N, 1, 8, 8), float32 from 0 to 1, and labels (N,), int64; new tensors at every call.

    >>> from onebasin.datasets import digits
    >>> images, labels = digits("test")
    >>> images.shape, labels.bincount().tolist()
    (torch.Size([355, 1, 8, 8]), [35, 36, 35, 36, 36, 36, 36, 35, 34, 36])
    """
    check_split(split)
    with resources.files("onebasin.datasets").joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
        images, labels = stored["images"], stored["labels"].astype(np.int64)
    rank = np.zeros_like(labels)
    for label in range(10):
        members = labels == label
        rank[members] = np.arange(members.sum())
    chosen = (rank % _TEST_EVERY == _TEST_EVERY - 1) == (split == "test")
    return torch.from_numpy(images[chosen]).float().div_(16).unsqueeze(1), torch.from_numpy(labels[chosen])


def check_split(split: str) -> None:
    """Refuse what is neither "train" nor "test"."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
