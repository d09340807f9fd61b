"""Every name of PyTorch that PyTorch does not promise to keep, in one place.

Every entry below was seen to work on torch 2.11 and on torch 2.13, the ends of the range that ``pyproject.toml`` allows.
Each says what it is for, and what onebasin would have to do, or could not do, without it. If a later PyTorch no longer has a
name, that shows at once: names that are imported or assigned here fail when onebasin is imported, and names that are looked
up inside a function raise an AttributeError at its first call. ``tests/test_torch_internals.py`` tests every entry.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "GROUPED_MM",
    "BatchNorm",  # the base class of all batch norms, to find them in a module; without it each would have to be listed
    "Convolution",  # the base class of all convolutions, to find them in a module; without it each would have to be listed
    "TorchDispatchMode",  # sees every operation of a call, to record it; without it modules are exported, which is slower
    "add_all",
    "below_autograd",
    "find_schema",
    "ignore_torch_function",
    "is_batched",
    "is_composite",
    "is_transformed",
    "make_stand_in",
    "memory_id",
    "overload_name",
    # These four walk nested lists, tuples and dicts of tensors; without them a batch would have to be a pair of tensors.
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]


def below_autograd() -> AbstractContextManager[None]:
    """Within it a dispatch mode sees operations as modules call them, such as ``linear``, before autograd splits them up.

    Without it recordings would consist of smaller operations, and attention would not be seen as one.
    """
    return torch._C._AutoDispatchBelowAutograd()


GROUPED_MM = torch.ops.aten._grouped_mm.default
"""What `torch.nn.functional.grouped_mm` calls: rows times the matrix of their group, as in a mixture of experts.

Without it such mixtures are exported in place of recorded, which is slower.
"""

ignore_torch_function = torch._C._disabled_torch_function_impl
"""As the ``__torch_function__`` of a tensor subclass: its operations go straight to the dispatcher.

Without it PyTorch's default would turn a plain tensor that an operation on a stand-in returns into a stand-in, which nothing
has recorded.
"""


def make_stand_in(cls: type[Tensor], like: Tensor, device: torch.device) -> Any:
    """A tensor of a subclass that has a shape, strides, a type and a device, and no memory.

    Without it recordings would have to run on real tensors.
    """
    return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device
    )


def memory_id(tensor: Tensor) -> int:
    """The same number for all views of one tensor, on the meta device too.

    ``data_ptr()`` is zero there: without this number views could not be told from copies in a recording.
    """
    return tensor.untyped_storage()._cdata


def find_schema(operation: Any) -> Any:
    """The schema of an ATen operation: its name, arguments, and what it writes; None if it is something else.

    Without it rules could not read arguments by name.
    """
    return getattr(operation, "_schema", None)


def overload_name(operation: Any) -> str:
    """Which overload of an operation this is, such as "Tensor" of ``add_.Tensor``.

    It finds the operation that returns what another writes, ``add.Tensor`` for ``add_.Tensor``. Without it no write could be
    recorded, and modules with operations in place would be exported, which takes ten times as long.
    """
    return operation._overloadname


def is_composite(operation: Any) -> bool:
    """Whether an operation is defined by other operations, so that its schema does not tell if it returns a view.

    Without it every exported graph would have to be spelt out without mutation, which doubles the time to trace a ResNet.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")


def is_transformed(tensor: Tensor) -> bool:
    """Whether a transformation of torch.func stands between this tensor and its values.

    Without it the gradients that torch.func takes inside a module could not be told from those of ``backward``, and modules
    with either would be refused; and each backward pass of the Sinkhorn operator would need a node of its own, for vmap.
    """
    return _functorch.is_functorch_wrapped_tensor(tensor)


def is_batched(tensor: Tensor) -> bool:
    """Whether vmap is one of those transformations: then values cannot be read, and nothing may depend on them.

    Without it the Sinkhorn operator could not tell when to leave out the check of its plans, and would fail inside vmap
    unless the caller turned the check off.
    """
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def add_all(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Sums of pairs of tensors in few launches; without it, one launch for each pair."""
    return torch._foreach_add(tensors, others)  # pyright: ignore
