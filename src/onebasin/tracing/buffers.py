"""Which buffers of the state move like parameters, and which are tables that a module may make anew for other inputs."""

from __future__ import annotations

from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node

from onebasin.programs.graph import Program
from onebasin.programs.shapes import bind_arguments
from onebasin.tracing.trace import operation_name

_CUTTING = {"slice", "narrow", "select", "split", "split_with_sizes", "chunk", "tensor_split", "unbind"}
_LOOKING_UP = {"index": "indices", "index_select": "index", "gather": "index", "embedding": "indices"}
_RESHAPING = {
    *("to", "_to_copy", "detach", "alias", "clone", "contiguous", "type_as", "lift_fresh_copy"),
    *("view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "t", "expand", "flatten"),
}


def find_fixed_buffer_reason(program: Program, node: Node) -> str | None:
    """Why a buffer of the state cannot move, if it cannot.

    A parameter is the same for all inputs. A buffer of which a call reads a part, by positions, may be a table (of rotary
    positions, a mask) that the module makes again when an input is longer. One that is read whole is like a parameter.
    """
    value = node.meta["val"]
    if not (value.is_floating_point() or value.is_complex()):
        return "a buffer of integers"
    return "a buffer that is read in part, by position" if _is_read_in_part(program, node) else None


def _is_read_in_part(program: Program, buffer: Node) -> bool:
    pending = [buffer]
    while pending:
        node = pending.pop()
        for user in node.users:
            name = operation_name(user)
            if name in _RESHAPING:
                pending.append(user)
            elif name in _CUTTING and not _keeps_all(user):
                return True
            elif name in _LOOKING_UP:
                arguments = bind_arguments(user)
                chosen = arguments[_LOOKING_UP[name]]
                indices = [i for i in (chosen if isinstance(chosen, (list, tuple)) else [chosen]) if i is not None]
                if node not in indices and not any(_depends_on_parameters(program, i) for i in indices):
                    return True
    return False


def _keeps_all(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.shape == node.all_input_nodes[0].meta["val"].shape


def _depends_on_parameters(program: Program, node: Node) -> bool:
    pending, seen = [node], {node}
    while pending:
        found = pending.pop()
        if found.op == "placeholder" and program.inputs[found.name][0] == InputKind.PARAMETER:
            return True
        new = [operand for operand in found.all_input_nodes if operand not in seen]
        seen.update(new)
        pending += new
    return False
