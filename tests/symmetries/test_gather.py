"""One gather moves a tensor as advanced indexing does, by every path of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onebasin as ob
from onebasin.symmetries import gather as module
from onebasin.symmetries.gather import gather
from onebasin.symmetries.indices import gather_indices


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_axes_move_independently(shape, data):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    moved = [data.draw(st.booleans()) for _ in shape]
    indices = tuple(torch.randperm(n) if m else None for n, m in zip(shape, moved, strict=True))
    mesh = torch.meshgrid(*(torch.arange(n) if i is None else i for n, i in zip(shape, indices, strict=True)), indexing="ij")
    assert torch.equal(gather(tensor, indices), tensor[mesh])


@pytest.mark.parametrize("tile_bytes", [64, 1 << 19])
@pytest.mark.parametrize("thread_bytes", [256, 1 << 21])
def test_tiles_and_threads(tile_bytes, thread_bytes, monkeypatch):
    monkeypatch.setattr(module, "_TILE_BYTES", tile_bytes)
    monkeypatch.setattr(module, "_THREAD_BYTES", thread_bytes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    rows, columns = torch.randperm(37), torch.randperm(41)
    for tensor in (torch.randn(37, 41), torch.randn(37, 41, 3, 3)):
        rest = (None,) * (tensor.dim() - 2)
        assert torch.equal(gather(tensor, (rows, columns, *rest)), tensor[rows][:, columns])


def test_threads_know_of_inference_mode(monkeypatch):
    monkeypatch.setattr(module, "_THREAD_BYTES", 256)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    rows, columns = torch.randperm(37), torch.randperm(41)
    with torch.inference_mode():
        tensor = torch.randn(37, 41)
        assert torch.equal(gather(tensor, (rows, columns)), tensor[rows][:, columns])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3, 0)])
def test_tensors_without_entries(shape):
    indices = tuple(torch.randperm(n) for n in shape)
    assert gather(torch.zeros(shape), indices).shape == shape


def test_what_does_not_move_is_not_copied():
    tensor = torch.randn(3, 4)
    assert gather(tensor, (None, None)) is tensor
    assert gather(tensor.to("meta"), (torch.randperm(3), None)).shape == (3, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8])
@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 3, 3), (7, 5, 1, 1), (300, 1000)])
def test_gather_of_every_type(dtype, shape):
    tensor = torch.randint(-100, 100, shape).to(dtype)
    symmetry = ob.Symmetry.from_axes(
        {"w": "a b" + " 3 3" * (shape[2:] == (3, 3)) + " 1 1" * (shape[2:] == (1, 1))},
        ["a", "b"],
        {"w": tensor},
    )
    p = symmetry.random()
    indices = gather_indices(symmetry.layouts["w"], p.indices, symmetry.parents)
    for source in (tensor, tensor.transpose(0, 1).contiguous().transpose(0, 1)):
        moved = gather(source, indices)
        assert moved.dtype == dtype
        assert torch.equal(moved, tensor[p["a"]][:, p["b"]])


@pytest.mark.parametrize(
    "name",
    [
        "bool", "uint8", "int8", "int16", "uint16", "uint32", "uint64", "float16", "bfloat16", "complex32", "complex128",
        "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_entries_of_every_type_move(name):
    dtype = getattr(torch, name)
    content = torch.randint(2 if dtype == torch.bool else 100, (6, 5 * dtype.itemsize), dtype=torch.uint8)
    tensor, rows, columns = content.view(dtype), torch.randperm(6), torch.randperm(5)
    for indices in ((rows, columns), (rows, None), (None, columns)):
        moved = gather(tensor, indices)
        assert moved.dtype == dtype
        expected = content.view(6, 5, dtype.itemsize)
        expected = expected if indices[0] is None else expected[rows]
        expected = expected if indices[1] is None else expected[:, columns]
        assert torch.equal(moved.view(torch.uint8), expected.reshape(6, -1))
