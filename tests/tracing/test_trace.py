"""What a rule is given, and what it may say."""

import pytest
import torch

from onebasin.symmetries import Pin
from onebasin.tracing.axes.terms import ONE, Atom, Product, leaves
from onebasin.tracing.trace import Arguments, NotCovered, Trace, operation_name, replace_axis


def make_arguments(operation, result, **values):
    node = torch.fx.Graph().create_node("call_function", operation)
    node.meta["val"] = result
    return Arguments(values, node)


def test_arguments():
    axes = Atom(2), Atom(3)
    args = make_arguments(torch.ops.aten.sum.dim_IntList, torch.ones(2, device="meta"), input=axes, dim=-1, keepdim=False)
    assert args.input is axes
    assert args.operands == [axes]
    assert args.operation == operation_name(args.node) == "sum"
    assert (args.dim, args.axis(-2), args.axes([0, -1]), args.axes(None)) == (1, 0, {0, 1}, {0, 1})
    assert (args.shape, args.shapes, args.returns_several) == ((2,), [(2,)], False)
    assert args.get("dtype") is None
    with pytest.raises(KeyError):
        args["dims"]
    with pytest.raises(NotCovered, match="'rows' is not one of its axes"):
        args.axis("rows")


def test_arguments_of_scalars_and_several_results():
    results = [torch.ones((), device="meta")] * 2
    args = make_arguments(torch.ops.aten.max.dim, results, input=(), dim=0)
    assert args.axes(0) == set()
    assert (args.shapes, args.returns_several) == ([(), ()], True)
    with pytest.raises(NotCovered):
        args.dim  # noqa: B018


def test_reasons_name_the_operation():
    trace = Trace()
    trace.enter("add", "block.0")
    axis = Atom(3)
    trace.pin(axis, reason="for a test")
    assert axis.pin == Pin("for a test", "add", "block.0")
    assert trace.pinned(3, "empty").pin == Pin("empty", "add", "block.0")
    products = Product((Atom(2), Atom(3))), Product((Atom(3), Atom(2)))
    trace.join(*products)
    assert {str(atom.pin) for atom in leaves(products[0])} == {"joined with an axis of another structure (add in block.0)"}


def test_axes_of_size_one_are_broadcast():
    trace, axis = Trace(), Atom(3)
    assert trace.join(ONE, axis, ONE) is axis
    assert trace.join(ONE, ONE) is ONE
    assert trace.join() is ONE


def test_an_axis_that_cannot_be_split_is_pinned():
    trace, axis = Trace(), Product((Atom(2), Atom(3)))
    outer, inner = trace.split(axis, 2)
    assert (outer.size, inner.size) == (3, 2)
    assert all(atom.pin for term in (axis, outer, inner) for atom in leaves(term))


def test_axes_are_replaced():
    a, b, c = Atom(2), Atom(3), Atom(4)
    assert replace_axis((a, b), 0, c) == (c, b)
    assert replace_axis((a, b), 1) == (a,)
    assert replace_axis((a, b), 1, b, c) == (a, b, c)


def test_ties_give_aliases():
    assert Trace((("a", "b"), ("c", "d", "e"))).aliases == {"a": "a", "b": "a", "c": "c", "d": "c", "e": "c"}
