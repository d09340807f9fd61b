"""Shapes, strides and types are inferred as PyTorch computes them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onebasin.programs import shapes
from onebasin.programs.failures import NotRecordable
from onebasin.programs.recording import record
from onebasin.programs.shapes import bind_arguments, functional_variant, written_arguments
from tests.cases import Fn, call_of, image, weight

aten = torch.ops.aten


def test_shapes_that_are_foreseen_are_those_that_are_computed(monkeypatch):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(4 * 36, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2, bias=False),
    )  # fmt: skip

    def read():
        nodes = record(model, call_of(image()())).graph.nodes
        return [(n.meta["val"].shape, n.meta["val"].stride(), n.meta["val"].dtype) for n in nodes if n.op == "call_function"]

    foreseen = read()
    monkeypatch.setattr(shapes, "_infer_common", lambda func, *args: None)
    assert read() == foreseen


@pytest.mark.parametrize(
    "operation",
    [
        torch.relu,
        torch.tanh,
        lambda x: F.batch_norm(x, torch.ones(3), torch.ones(3)),
        lambda x: F.batch_norm(x, None, None, training=True),
    ],
)
@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:, :, :1].expand(2, 3, 8, 8),
        lambda x: x[..., ::2],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["plain", "channels last", "expanded", "with gaps", "transposed"],
)
def test_strides_are_those_that_are_computed(operation, arrange):
    inputs = torch.rand(2, 3, 8, 8)
    program = record(Fn(lambda self, x: operation(arrange(x))), call_of(inputs))
    (result,) = next(n for n in program.graph.nodes if n.op == "output").args[0]
    assert result.meta["val"].stride() == operation(arrange(inputs)).stride()


@pytest.mark.parametrize("num_columns", [8, 5])
def test_products_of_groups_are_foreseen(num_columns):
    model = Fn(lambda self, x, offsets: F.grouped_mm(x, self.w.mT, offs=offsets), w=weight(3, num_columns, 4))
    inputs = torch.rand(7, 4), torch.tensor([2, 4, 7], dtype=torch.int32)
    (result,) = next(n for n in record(model, call_of(inputs)).graph.nodes if n.op == "output").args[0]
    expected = model(*inputs)
    assert (result.meta["val"].shape, result.meta["val"].stride()) == (expected.shape, expected.stride())


def test_numbers_may_be_on_another_device():
    def forward(self, x):
        found = self.scale * x, x.to(self.scale), x * 2, x.cpu()
        assert [tensor.device.type for tensor in found] == ["meta", "cpu", "meta", "cpu"]
        return found

    record(Fn(forward, scale=nn.Parameter(torch.tensor(1.0))), call_of(torch.rand(3, device="meta")))


def test_types_are_those_of_the_model():
    model = Fn(lambda self, x: (x.half() @ self.w.half()).float(), w=weight(4, 3))
    (result,) = next(n for n in record(model, call_of(torch.rand(3, 4))).graph.nodes if n.op == "output").args[0]
    assert result.meta["val"].dtype == torch.float32


def test_what_operations_write():
    assert written_arguments(aten.relu_.default) == (0,)
    assert written_arguments(aten.add.out) == (3,)
    assert written_arguments(aten.relu.default) == ()
    assert functional_variant(aten.relu_.default) is aten.relu.default
    assert functional_variant(aten.add_.Tensor) is aten.add.Tensor
    assert functional_variant(aten.add.out) is None


def test_arguments_are_bound_by_name():
    node = torch.fx.Graph().create_node("call_function", aten.sum.dim_IntList, (None, [1]), {"keepdim": True})
    assert bind_arguments(node) == {"self": None, "dim": [1], "keepdim": True, "dtype": None}


def test_compressed_sparse_results_are_not_recorded():
    def forward(self, x, rows, columns):
        return torch.sparse_csr_tensor(rows, columns, x.flatten(), (3, 4)) @ self.weight.mT

    inputs = torch.rand(3, 4), torch.tensor([0, 4, 8, 12]), torch.arange(4).repeat(3)
    with pytest.raises(NotRecordable, match="returns a sparse tensor"):
        record(Fn(forward, weight=weight(8, 4)), call_of(inputs))
