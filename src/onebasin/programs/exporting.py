"""A call of a module, exported: slower than a recording, but able to follow writes that a recording cannot."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from onebasin.programs.calls import Call
from onebasin.programs.failures import NotExportable, describe_error
from onebasin.programs.graph import FrontEnd, Program
from onebasin.programs.isolation import MutedStream, isolated
from onebasin.programs.shapes import written_arguments
from onebasin.torch_internals import find_schema, is_composite, memory_id, tree_leaves


def export(model: nn.Module, call: Call, reason: str = "") -> Program:
    """Export one call, which could not be recorded for this reason. The model is left as it was.

    Raises:
        NotExportable: if the module fails, or its control flow depends on values.
    """
    with isolated(model, call) as snapshot, snapshot.restoring_values():
        exported = _export(model, call)
        _check_operations(exported.graph)
        _check_constants(model, exported.constants)
    for node in exported.graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).items())
        node.meta["module"] = (stack[-1][1][0], stack[-1][0]) if stack else ("", "")
    inputs, given, kept = {}, {}, {}
    arguments = iter(call.leaves)
    for spec in exported.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        kind, key = spec.kind, spec.target or name
        if kind == InputKind.BUFFER and not spec.persistent:
            kind = InputKind.CONSTANT_TENSOR
        inputs[name] = (kind, key)
        if kind == InputKind.USER_INPUT:
            given[name] = next(arguments)
        elif kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            given[name] = exported.constants.get(key)
            if spec.kind == InputKind.BUFFER:
                kept[name] = given[name]
    for node in exported.graph.nodes:
        if node.name in kept:
            node.meta["kept"] = kept[node.name]
    return Program(exported.graph, inputs, given, FrontEnd("export", reason))


def _export(model: nn.Module, call: Call) -> ExportedProgram:
    try:
        with contextlib.redirect_stderr(MutedStream(sys.stderr)):  # the exporter prints the graph of a failed export
            exported = torch.export.export(model, call.args, call.kwargs, strict=False)
    except Exception as error:
        raise NotExportable(describe_error(error)) from error
    _inline_regions(exported.graph_module)
    if _has_visible_writes(exported.graph):
        try:
            with contextlib.redirect_stderr(MutedStream(sys.stderr)):
                return exported.run_decompositions({})
        except Exception as error:
            raise NotExportable(describe_error(error)) from error
    return exported


_DERIVATIVES = ("_grad_increment_nesting", "_jvp_increment_nesting")


def _check_operations(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "get_attr" or getattr(node.target, "__name__", "") in _DERIVATIVES:
            raise NotExportable(f"{node.name} is not an operation on tensors")
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
                raise NotExportable(f"the size of the result of {node.name} depends on values of tensors")


def _check_constants(model: nn.Module, constants: Mapping[str, Any]) -> None:
    """Refuse a view of a parameter that a module keeps: the exporter takes it for a constant."""
    state = model.state_dict(keep_vars=True).values()
    owned = {memory_id(value) for value in state if isinstance(value, Tensor) and value.layout == torch.strided}
    buffers = {id(buffer) for buffer in model.buffers()}
    for name, value in constants.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or id(value) in buffers:
            continue
        if memory_id(value) in owned:
            raise NotExportable(f"{name} is neither a parameter nor a buffer, but shares the memory of one")


_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def _inline_regions(module: torch.fx.GraphModule) -> None:
    """Replace calls of regions without gradients, or in other precision, by the operations of the region.

    Neither setting changes which axes move together, and verification promotes everything to float64 anyway.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in _REGIONS:
            continue
        position = next(i for i, arg in enumerate(node.args) if isinstance(arg, torch.fx.Node) and arg.op == "get_attr")
        name = node.args[position]
        body = getattr(module, name.target)
        _inline_regions(body)
        inner = body.graph.nodes
        if any(n.op == "get_attr" for n in inner):
            continue
        operands = dict(zip((n for n in inner if n.op == "placeholder"), node.args[position + 1 :], strict=True))
        with module.graph.inserting_before(node):
            results = cast(tuple[Any, ...], module.graph.graph_copy(body.graph, operands))
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        if not name.users:
            module.graph.erase_node(name)
    module.recompile()


def _has_visible_writes(graph: torch.fx.Graph) -> bool:
    """Whether some in-place operation may be visible through another tensor.

    ``relu_`` on the new result of a convolution, which nothing else reads, is just ``relu``. Decomposing such graphs into
    operations without writes would double the time to trace a ResNet for nothing.
    """
    for node in graph.nodes:
        schema = find_schema(node.target)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        if schema.name == "aten::dropout_" and node.args[2] is False:  # writes nothing
            continue
        target = node.args[0]
        if not (isinstance(target, torch.fx.Node) and target.op == "call_function"):
            return True
        if len(target.users) > 1 or written_arguments(node.target) != (0,) or not _makes_memory(target.target):
            return True
    return False


_MAKING_MEMORY = {
    *("conv1d", "conv2d", "conv3d", "linear", "batch_norm", "layer_norm", "group_norm", "matmul"),
    "scaled_dot_product_attention",
}
"""Composite operations whose result always has memory of its own. The schema does not say so: dropout in eval mode returns
its input."""


def _makes_memory(operation: Any) -> bool:
    schema = find_schema(operation)
    if schema is None:
        return False
    if schema.is_mutable:  # writes into its input, which was found to have no other reader
        return True
    if any(result.alias_info is not None for result in schema.returns):
        return False
    return not is_composite(operation) or schema.name.removeprefix("aten::") in _MAKING_MEMORY
