"""Each private name of PyTorch does what its description promises."""

import torch
from torch import Tensor, nn

from onebasin import torch_internals as internals

ATEN = torch.ops.aten


class Recorder(internals.TorchDispatchMode):
    """The names of the operations that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_below_autograd_operations_are_whole():
    layer, x = nn.Linear(2, 3), torch.rand(4, 2)
    with Recorder() as usual:
        layer(x)
    with internals.below_autograd(), Recorder() as whole:
        layer(x)
    assert whole.seen == ["aten.linear.default"]
    assert "aten.linear.default" not in usual.seen


def test_a_stand_in_has_everything_but_memory():
    class StandIn(Tensor):
        __torch_function__ = internals.ignore_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return torch.full((1,), 3.0) if func is ATEN.relu.default else NotImplemented

    like = torch.rand(3, 4, dtype=torch.float64).T
    found = internals.make_stand_in(StandIn, like, torch.device("meta"))
    assert (type(found), found.shape, found.stride(), found.dtype) == (StandIn, like.shape, like.stride(), like.dtype)
    assert found.device.type == "meta"
    assert type(torch.relu(found)) is Tensor  # as the dispatcher returned it; PyTorch's default makes it a StandIn


def test_views_share_a_number_and_copies_do_not():
    for device in ("cpu", "meta"):
        tensor = torch.empty(2, 3, device=device)
        assert internals.memory_id(tensor) == internals.memory_id(tensor.T[1:])
        assert internals.memory_id(tensor) != internals.memory_id(copy := tensor.clone()), copy


def test_schemas_and_overloads():
    assert [argument.name for argument in internals.find_schema(ATEN.add.Tensor).arguments] == ["self", "other", "alpha"]
    assert internals.find_schema(torch.relu) is None
    assert internals.overload_name(ATEN.add.Tensor) == "Tensor"
    assert internals.overload_name(ATEN.relu.default) == "default"


def test_composite_operations():
    assert internals.is_composite(ATEN.reshape.default)
    assert not internals.is_composite(ATEN.view.default)


def test_transformations_of_values_are_seen():
    seen = []

    def look(x):
        seen.append((internals.is_transformed(x), internals.is_batched(x)))
        return x.sum()

    x = torch.rand(2, 3)
    look(x)
    torch.func.grad(look)(x)
    torch.vmap(look)(x)
    torch.vmap(torch.func.grad(look))(x)
    assert seen == [(False, False), (True, False), (True, True), (True, True)]


def test_sums_of_pairs():
    found = internals.add_all([torch.ones(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)])
    assert [value.tolist() for value in found] == [[2, 2], [1, 1, 1]]


def test_products_of_groups():
    rows, weights, offsets = torch.rand(4, 4), torch.rand(2, 4, 4), torch.tensor([1, 4], dtype=torch.int32)
    with internals.below_autograd(), Recorder() as seen:
        nn.functional.grouped_mm(rows, weights, offs=offsets)
    assert seen.seen == [str(internals.GROUPED_MM)]


def test_base_classes():
    assert all(issubclass(kind, internals.BatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert all(issubclass(kind, internals.Convolution) for kind in (nn.Conv1d, nn.ConvTranspose2d, nn.LazyConv3d))


def test_trees_are_taken_apart_and_put_together():
    tree = {"a": [1, (2, 3)]}
    leaves, structure = internals.tree_flatten(tree)
    assert leaves == internals.tree_leaves(tree) == [1, 2, 3]
    assert internals.tree_unflatten([value * 2 for value in leaves], structure) == internals.tree_map(lambda v: v * 2, tree)
