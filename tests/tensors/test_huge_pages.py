"""Huge pages are a hint: they change how long it takes to fill a tensor, not what is in it."""

import mmap

import pytest
import torch

from onebasin.tensors.huge_pages import ask_for_huge_pages


@pytest.mark.parametrize("num_entries", [0, 10, 1 << 19, (1 << 21) + 3])
def test_contents_stay(num_entries):
    tensor = torch.arange(num_entries, dtype=torch.float32)
    ask_for_huge_pages(tensor)
    assert torch.equal(tensor, torch.arange(num_entries, dtype=torch.float32))
    tensor.fill_(1)
    assert tensor.sum() == num_entries


def test_systems_without_huge_pages(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    tensor = torch.ones(1 << 20)
    ask_for_huge_pages(tensor)
    assert tensor.sum() == 1 << 20
