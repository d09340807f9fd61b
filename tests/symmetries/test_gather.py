"""One gather moves a tensor as advanced indexing does, by every path of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onebasin as ob
from onebasin.symmetries import gather as module
from onebasin.symmetries.gather import gather
from onebasin.symmetries.indices import gather_indices


@pytest.fixture(params=["whole", "blocks"])
def size_of_blocks(request, monkeypatch):
    """Tensors of the tests are moved whole, as small ones are, or in blocks of 64 bytes by three threads."""
    if request.param == "blocks":
        _cut_into_blocks(monkeypatch)


def _cut_into_blocks(patch, block_bytes=64, num_threads=3):
    patch.setattr(module, "_SMALL_BYTES", 0)
    patch.setattr(module, "_BLOCK_BYTES", block_bytes)
    patch.setattr(module, "_THREAD_BYTES", block_bytes)
    patch.setattr(torch, "get_num_threads", lambda: num_threads)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([None, 1, 16, 100]), st.integers(1, 3), st.data()
)
@settings(max_examples=120, deadline=None)
def test_axes_move_independently(shape, block_bytes, num_threads, data):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = tensor.clone()
    moved = [data.draw(st.booleans()) for _ in shape]
    indices = tuple(torch.randperm(n) if m else None for n, m in zip(shape, moved, strict=True))
    mesh = torch.meshgrid(*(torch.arange(n) if i is None else i for n, i in zip(shape, indices, strict=True)), indexing="ij")
    with pytest.MonkeyPatch.context() as patch:
        if block_bytes is not None:
            _cut_into_blocks(patch, block_bytes, num_threads)
        assert torch.equal(gather(tensor, indices), before[mesh])
        assert torch.equal(tensor, before)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("block_bytes", [64, 1 << 19])
def test_blocks_and_threads(block_bytes, num_threads, monkeypatch):
    _cut_into_blocks(monkeypatch, block_bytes, num_threads)
    rows, columns = torch.randperm(37), torch.randperm(41)
    for tensor in (torch.randn(37, 41), torch.randn(37, 41, 3, 3), torch.randn(37, 41, 7, 7)):
        rest = (None,) * (tensor.dim() - 2)
        assert torch.equal(gather(tensor, (rows, columns, *rest)), tensor[rows][:, columns])
        assert torch.equal(gather(tensor, (rows, None, *rest)), tensor[rows])
        assert torch.equal(gather(tensor, (None, columns, *rest)), tensor[:, columns])
    assert torch.equal(gather(columns, (columns.flip(0),)), columns[columns.flip(0)])


def test_large_tensors_move_in_blocks():
    tensor, rows, columns = torch.randn(1500, 1000), torch.randperm(1500), torch.randperm(1000)
    later = []
    moved = gather(tensor, (rows, columns), later)
    assert len(later) > 1
    module.fill(later)
    assert torch.equal(moved, tensor[rows][:, columns])


def test_blocks_of_many_tensors(monkeypatch):
    _cut_into_blocks(monkeypatch)
    rows, columns, later = torch.randperm(9), torch.randperm(7), []
    tensors = [torch.randn(9, 7), torch.randn(9, 7).double(), torch.arange(63).view(9, 7), torch.randn(9, 7, 40)]
    moved = [gather(t, (rows, columns, None)[: t.dim()], later) for t in tensors]
    module.fill(later)
    for tensor, result in zip(tensors, moved, strict=True):
        assert torch.equal(result, tensor[rows][:, columns])


def test_threads_know_of_inference_mode(monkeypatch):
    _cut_into_blocks(monkeypatch)
    rows, columns = torch.randperm(37), torch.randperm(41)
    with torch.inference_mode():
        tensor = torch.randn(37, 41)
        assert torch.equal(gather(tensor, (rows, columns)), tensor[rows][:, columns])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_errors_of_threads_are_raised(num_threads, monkeypatch):
    _cut_into_blocks(monkeypatch, num_threads=num_threads)
    with pytest.raises(RuntimeError, match="out of DATA bounds"):
        gather(torch.randn(37, 41), (torch.arange(37), torch.arange(41) + 1))


@pytest.mark.usefixtures("size_of_blocks")
def test_gradients_flow_through_a_gather():
    tensor, rows, columns = torch.randn(9, 7, requires_grad=True), torch.randperm(9), torch.randperm(7)
    weight = torch.randn(9, 7)
    (gather(tensor, (rows, columns)) * weight).sum().backward()
    assert tensor.grad is not None
    assert torch.equal(tensor.grad[rows][:, columns], weight)


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
@pytest.mark.usefixtures("size_of_blocks")
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
@pytest.mark.usefixtures("size_of_blocks")
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


@pytest.mark.usefixtures("size_of_blocks")
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_move():
    tensor, rows, columns = torch.randn(6, 5), torch.randperm(6), torch.randperm(5)
    assert torch.equal(gather(tensor.to_sparse(), (rows, columns)).to_dense(), tensor[rows][:, columns])
