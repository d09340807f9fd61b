"""A call of a module, exported: slower than a recording, and able to follow values and writes that a recording cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from onebasin.programs.graph import Call, Program, evaluation_mode, quiet
from onebasin.programs.shapes import written
from onebasin.programs.snapshots import Belongings
from onebasin.torch_internals import find_schema, is_composite, memory_id, tree_leaves


def export(model: nn.Module, call: Call) -> Program:
    """Trace one call to a graph without side effects.

    Raises:
        ValueError: if the inputs do not fit the model, or its control flow depends on data.
    """
    try:
        belongings = Belongings(model, tree_leaves((call.args, call.kwargs)))
        with evaluation_mode(model), quiet(), belongings.restored(), belongings.rewritten():
            exported = torch.export.export(model, call.args, call.kwargs, strict=False)
            _inline_regions(exported.graph_module)
            if _mutates(exported.graph):
                exported = exported.run_decompositions({})
            _check_operations(exported.graph)
            _check_constants(model, exported.constants)
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if "Cache'> in output" in first:  # a class of transformers'; the exporter goes on about registering it
            raise ValueError(
                f"cannot trace {type(model).__name__}: it returns a cache of past keys and values. "
                "Turn that off with model.config.use_cache = False."
            ) from error
        raise ValueError(
            f"cannot trace {type(model).__name__} with these example inputs: {first}\n"
            "If the inputs do not fit the model, correct them. If its control flow depends on the data, write the "
            "symmetry by hand with onebasin.Symmetry.from_axes and check it with verify."
        ) from error
    for node in exported.graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).items())
        node.meta["module"] = (stack[-1][1][0], stack[-1][0]) if stack else ("", "")
    inputs, given = {}, {}
    arguments = iter(tree_leaves((call.args, call.kwargs)))
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
    return Program(exported.graph, inputs, given)


_DERIVATIVES = ("_grad_increment_nesting", "_jvp_increment_nesting")


def _check_operations(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "get_attr" or getattr(node.target, "__name__", "") in _DERIVATIVES:
            raise ValueError(f"{node.name} is not an operation on tensors")
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
                raise ValueError(f"the size of {node.name} depends on the data")


def _check_constants(model: nn.Module, constants: Mapping[str, Any]) -> None:
    """A view of a parameter that a module keeps is a constant to the exporter, but moves with the parameter."""
    state = model.state_dict(keep_vars=True).values()
    owned = {memory_id(value) for value in state if isinstance(value, Tensor) and value.layout == torch.strided}
    buffers = {id(buffer) for buffer in model.buffers()}
    for name, value in constants.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or id(value) in buffers:
            continue
        if memory_id(value) in owned:
            raise ValueError(f"{name} shares its memory with a parameter or a buffer, but is none")


_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def _inline_regions(module: torch.fx.GraphModule) -> None:
    """Put the operations of regions without gradients, or in other precision, where the region is called.

    Neither setting changes which axes move together, and verification promotes everything to float64 anyway.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in _REGIONS:
            continue
        place = next(i for i, arg in enumerate(node.args) if isinstance(arg, torch.fx.Node) and arg.op == "get_attr")
        name = node.args[place]
        body = getattr(module, name.target)
        _inline_regions(body)
        inner = body.graph.nodes
        if any(n.op == "get_attr" for n in inner):
            continue
        operands = dict(zip((n for n in inner if n.op == "placeholder"), node.args[place + 1 :], strict=True))
        with module.graph.inserting_before(node):
            results = cast(tuple[Any, ...], module.graph.graph_copy(body.graph, operands))
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        if not name.users:
            module.graph.erase_node(name)
    module.recompile()


def _mutates(graph: torch.fx.Graph) -> bool:
    """Whether some in-place operation may be seen through another name.

    ``relu_`` on the fresh result of a convolution, which nobody else reads, is just ``relu``; spelling such graphs out
    without mutation would double the time to trace a ResNet for nothing.
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
        if len(target.users) > 1 or written(node.target) != (0,) or not _is_fresh(target.target):
            return True
    return False


# Composite operations whose result is always memory of its own. Of others their schemas do not tell: dropout in eval mode
# returns its input.
_FRESH = {
    "conv1d",
    "conv2d",
    "conv3d",
    "linear",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "matmul",
    "scaled_dot_product_attention",
}


def _is_fresh(operation: Any) -> bool:
    schema = find_schema(operation)
    if schema is None:
        return False
    if schema.is_mutable:  # writes into its input, which was found to be nobody else's
        return True
    if any(result.alias_info is not None for result in schema.returns):
        return False
    return not is_composite(operation) or schema.name.removeprefix("aten::") in _FRESH
