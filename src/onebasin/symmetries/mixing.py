"""Moving the entries of a tensor softly, by a plan for each group: the relaxed counterpart of `symmetries.gather`."""

import string
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onebasin.symmetries.layout import Factor, Layout, Term, names
from onebasin.symmetries.unrolling import Block, names_to_unroll, roll, unroll

# Larger tensors are worth a product of their own: stacking them, or putting them side by side, copies them. On the CPU a
# copy costs more than a call.
_STACKED_NUMEL = {"cuda": 1 << 18, "cpu": 1 << 12}
_JOINED_NUMEL = {"cuda": 1 << 20}

Plans = Mapping[str, Tensor]
"""For each group a plan, rows of the target and columns of the source. A child's plan has, in front, two axes (target and
source) for each free parent and one for each fixed parent: (H, H, d, d) holds a plan for every pair of heads."""


def mix(tensor: Tensor, layout: Layout, plans: Plans, parents: Mapping[str, tuple[str, ...]]) -> Tensor:
    """The soft counterpart of `gather`: new = (plans applied along their factors) old, differentiable in both.

    Axes are reshaped into their factors, so no Kronecker or block matrix is built. For a family the block for target
    h and source j is P[h, j] Q[h, j].
    """
    if not names(layout) & plans.keys():
        return tensor
    unrolled = names_to_unroll(plans.keys(), parents)
    blocks = (_mix_block(block, plans, parents) for block in unroll(layout, unrolled, tensor))
    return roll(layout, unrolled, blocks).to(tensor.dtype)


def mix_all(
    tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], plans: Plans, parents: Mapping[str, tuple[str, ...]]
) -> dict[str, Tensor]:
    """`mix` for many tensors at once; one that no plan moves is returned as it is.

    A network has dozens of vectors and small matrices, each hardly worth a launch. Small tensors of one shape whose axes are
    moved by plans of whole groups are multiplied as one batch; the other tensors that a plan moves are concatenated to one
    matrix.
    """
    result = dict(tensors)
    plain: dict[str, list[int]] = {}
    alike: dict[tuple[Any, ...], list[str]] = {}
    for key, tensor in tensors.items():
        axes = [axis for axis, term in enumerate(layouts[key]) if names((term,)) & plans.keys()]
        if not axes:
            continue
        if not all(_moves_plainly(layouts[key][axis], plans) for axis in axes):
            result[key] = mix(tensor, layouts[key], plans, parents)
            continue
        plain[key] = axes
        if is_stacked(tensor):
            alike.setdefault((tensor.shape, tensor.dtype, *axes), []).append(key)
    for (_, dtype, *axes), keys in alike.items():
        if len(keys) == 1:
            continue
        batch = torch.stack([tensors[key] for key in keys])
        for axis in reversed(axes):  # the first axis last: it leaves the batch contiguous
            chosen = torch.stack([plans[_group(layouts[key], axis)] for key in keys])
            front = batch.to(chosen.dtype).movedim(axis + 1, 1)
            batch = torch.bmm(chosen, front.flatten(2)).view(front.shape).movedim(1, axis + 1)
        result |= dict(zip(keys, batch.to(dtype).unbind(), strict=True))
        for key in keys:
            del plain[key]
    joined: dict[str, list[int]] = {}
    for key, axes in plain.items():
        if tensors[key].dim() == 1 or is_joined(tensors[key]):
            joined[key] = axes
        else:
            result[key] = mix(tensors[key], layouts[key], plans, parents)
    return result | _mix_joined({key: tensors[key] for key in joined}, joined, layouts, plans)


def _mix_joined(
    tensors: Mapping[str, Tensor], axes: Mapping[str, list[int]], layouts: Mapping[str, Layout], plans: Plans
) -> dict[str, Tensor]:
    """Tensors moved along some axes by plans of whole groups: one product per plan, the larger plans first.

    Forward and backward, the larger of two plans takes part in two products and the smaller in three, and the gradient of a
    plan is one product, not a sum of several.
    """
    result = dict(tensors)
    products: dict[tuple[str, int], dict[str, int]] = {}  # a group that moves two axes of a tensor has two products
    for key in tensors:
        seen: list[str] = []
        for axis in axes[key]:
            seen.append(_group(layouts[key], axis))
            products.setdefault((seen[-1], seen.count(seen[-1])), {})[key] = axis
    for (name, _), moved in sorted(products.items(), key=lambda item: -len(plans[item[0][0]])):
        plan = plans[name]
        if len(moved) == 1:
            result |= {key: _mix_axis(result[key], plan, axis) for key, axis in moved.items()}
            continue
        fronts = {key: result[key].to(plan.dtype).movedim(axis, 0) for key, axis in moved.items()}
        flat = [front.reshape(len(plan), -1) for front in fronts.values()]
        parts = (plan @ torch.cat(flat, 1)).split([part.shape[1] for part in flat], 1)
        for (key, front), part in zip(fronts.items(), parts, strict=True):
            result[key] = part.view(front.shape).movedim(0, moved[key])
    return {key: value.to(tensors[key].dtype) for key, value in result.items()}


def is_stacked(tensor: Tensor) -> bool:
    """Whether `mix_all` moves tensors of this one's shape as one batch."""
    return tensor.dim() > 1 and tensor.numel() <= _STACKED_NUMEL.get(tensor.device.type, 0)


def is_joined(tensor: Tensor) -> bool:
    """Whether `mix_all` concatenates it with the other tensors that the same plan moves, as it does any vector."""
    return tensor.numel() <= _JOINED_NUMEL.get(tensor.device.type, 0)


def _moves_plainly(term: Term, plans: Plans) -> bool:
    """Whether an axis is nothing but the units of one group that has no parents."""
    return isinstance(term, Factor) and plans[term.name or ""].dim() == 2


def _group(layout: Layout, axis: int) -> str:
    term = layout[axis]
    assert isinstance(term, Factor)
    assert term.name is not None
    return term.name


def _mix_block(block: Block, plans: Plans, parents: Mapping[str, tuple[str, ...]]) -> Tensor:
    """Contract each free axis of a block with its plan, the deepest children first."""
    (tensor,) = block.tensors
    labels = [name or "" for name in block.labels]
    moved = [axis for axis, name in enumerate(labels) if name in plans]
    ancestors = {axis: block.parent_axes(axis, parents.get(labels[axis], ())) for axis in moved}
    # Forward and backward, the first of two plans takes part in two products and the last in three: the smaller goes last.
    pending = sorted(moved, key=lambda axis: (-len(ancestors[axis]), -block.sizes[axis]))
    if not any(ancestors.values()):
        for axis in pending:
            tensor = _mix_axis(tensor, plans[labels[axis]], axis)
        return tensor
    source = list(string.ascii_lowercase[: len(labels)])
    target = [c.upper() if axis in moved else c for axis, c in enumerate(source)]

    def subscripts(axis: int) -> str:
        lead = "".join(target[a] + (source[a] if a in moved else "") for a in ancestors[axis])
        return lead + target[axis] + source[axis]

    state = list(source)
    while pending:
        # A plan is contracted together with those of its ancestors if it is the last that needs them; an ancestor that
        # is needed again stays in the tensor as a pair of axes, source and target.
        axis = pending.pop(0)
        closing: list[int] = []
        for a in reversed(ancestors[axis]):
            if a in pending and not any(a in ancestors[b] for b in pending if b not in closing):
                closing.append(a)
        pending = [a for a in pending if a not in closing]
        weight, letters = plans[labels[axis]], subscripts(axis)
        for a in closing:
            weight = torch.einsum(f"{letters},{subscripts(a)}->{letters}", weight, plans[labels[a]])
        held = [a for a in ancestors[axis] if a in moved and a not in closing and target[a] not in state]
        result = [target[i] if i in (axis, *closing) else c for i, c in enumerate(state[: len(labels)])]
        result += [c for c in state[len(labels) :] if c not in result] + [target[a] for a in held]
        tensor = torch.einsum(f"{''.join(state)},{letters}->{''.join(result)}", tensor.to(weight.dtype), weight)
        state = result
    return torch.einsum(f"{''.join(state)}->{''.join(target)}", tensor)


def _mix_axis(tensor: Tensor, plan: Tensor, axis: int) -> Tensor:
    """One plan along one axis, by products whose results are contiguous, as the next operation reads them."""
    tensor = tensor.to(plan.dtype)
    if axis == 0 and tensor.dim() > 1:
        return (plan @ tensor.flatten(1)).unflatten(1, tensor.shape[1:])
    return (tensor.movedim(axis, -1) @ plan.mT).movedim(-1, axis)
