"""The digits that come with the package."""

from pathlib import Path

import pytest
import torch
from torch import nn

import onebasin
from onebasin.datasets import digits


def test_shapes_and_ranges():
    for split, size in (("train", 1442), ("test", 355)):
        images, labels = digits(split)
        assert images.shape == (size, 1, 8, 8)
        assert images.dtype == torch.float32
        assert images.min() == 0
        assert images.max() == 1
        assert labels.shape == (size,)
        assert labels.dtype == torch.int64


def test_the_split_is_stratified_and_parts_no_image_in_two():
    (train, train_labels), (test, test_labels) = digits("train"), digits("test")
    share = test_labels.bincount() / (test_labels.bincount() + train_labels.bincount())
    assert share.min() > 0.19
    assert share.max() <= 0.2
    assert len(torch.cat([train, test]).unique(dim=0)) == 1797


def test_every_call_gives_new_tensors():
    digits("test")[0].zero_()
    assert digits("test")[0].max() == 1


def test_other_splits_are_refused():
    with pytest.raises(ValueError, match="'train' or 'test', got 'valid'"):
        digits("valid")  # type: ignore[arg-type]


def test_the_file_is_small():
    assert (Path(onebasin.__file__).parent / "datasets" / "digits.npz").stat().st_size < 50_000


def test_it_is_scikit_learns_copy():
    sklearn = pytest.importorskip("sklearn.datasets")
    expected = torch.from_numpy(sklearn.load_digits().images).float()[:, None] / 16
    ours = torch.cat([digits("train")[0], digits("test")[0]])
    assert torch.equal(ours.flatten(1).unique(dim=0), expected.flatten(1).unique(dim=0))


def test_a_linear_model_learns_it():
    images, labels = digits("train")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    images, labels = digits("test")
    assert (model(images).argmax(1) == labels).float().mean() > 0.93
