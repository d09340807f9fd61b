"""Move a fine-tune to another network: what it changed, carried by an alignment of the two networks it goes between.

With T the alignment of the old base to the new one, the result is new + scale (T(fine-tuned) - T(base)): task arithmetic
(Ilharco et al., 2023) with the difference in the order of the new network's units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Unpack, cast

import torch
from torch import nn

from onebasin.landscape.batches import copy_with_state, find_example
from onebasin.landscape.paths import Evaluate, read_metrics
from onebasin.matching.alignment import WANTED, WIDENED, Alignment, AlignOptions, align, transform_model
from onebasin.matching.canonical_form import canonicalise
from onebasin.matching.imitation import Imitation, learn_to_imitate
from onebasin.matching.methods import Method, MethodName
from onebasin.matching.recommendation import AUTO
from onebasin.matching.widening import is_narrower, widen
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.symmetries.multiplication import check_fixed
from onebasin.tensors.comparison import check_alike, check_finite
from onebasin.tensors.gradient_mode import computing_gradients
from onebasin.tensors.interpolation import interpolate
from onebasin.tensors.progress import Progress, show_progress
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import M, Model, State, read_state
from onebasin.tracing import Kinds


@dataclass(frozen=True)
class Ported(Generic[M]):
    """What `port` made, of models of type `M`.

    Attributes:
        model: a copy of the new base with the difference added (of a state dict a state, of a lazy state a lazy one).
        alignment: of the old base to the new one.
        scale: what the difference was multiplied by.
        losses: for each scale that was tried the loss, if a function to evaluate was given.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> tuned = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> found = ob.port(tuned, base=a, to=b, example_inputs=torch.zeros(1, 4), scale=0.5)
    >>> found.scale, found.model[0].weight.shape
    (0.5, torch.Size([8, 4]))
    """

    model: M
    alignment: Alignment[M]
    scale: float
    losses: dict[float, float] = field(default_factory=dict)


@computing_gradients
def port(
    fine_tuned: M,
    base: M,
    to: M,
    example_inputs: Any = None,
    symmetry: Symmetry | None = None,
    method: MethodName | Literal["auto"] | Method = AUTO,
    scale: float | Sequence[float] = 1.0,
    evaluate: Evaluate | None = None,
    imitation: Imitation | None = None,
    init: Permutation | Transform | MethodName | Method | None = None,
    seed: int = 0,
    **options: Unpack[AlignOptions],
) -> Ported[M]:
    """Carry what a fine-tune changed over to another base that was trained apart.

    Args:
        fine_tuned: a network that was trained further from `base`; left untouched, like the others.
        base: the network it started from.
        to: the network that the change is added to, of the same architecture. If it has more units, the other two are
            widened first, see `onebasin.widen`.
        example_inputs: to trace the symmetry with; see `onebasin.align`.
        symmetry: likewise.
        method: likewise; by which `base` is aligned to `to`.
        scale: what the change is multiplied by; several are tried if `evaluate` is given.
        evaluate: from a network to its loss, or to a dict of metrics with the key "loss", on held-out data; the scale with
            the lowest loss is taken.
        imitation: after the alignment, learn its scales and bases further, so that the result does what the fine-tune does.
        init: see `onebasin.align`.
        seed: likewise.
        **options: likewise; with ``kinds="all"`` the result is in canonical form, see `onebasin.canonical`.

    Buffers, such as the statistics of batch norms, are those of `to`: see `onebasin.reset_batch_norm`.

    Raises:
        ValueError: before any work is done, if the networks do not fit, hold NaN, or something is missing or out of range.
        TypeError: likewise, for what is of the wrong kind.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> old, new = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2))
    >>> ob.port(old, base=old, to=new, example_inputs=torch.zeros(1, 4)).scale
    1.0
    """
    if "untie" in options:
        raise TypeError("port has no argument untie=: give it networks that onebasin.canonical(..., untie=True) has made")
    scales = _check_scales(scale, evaluate, to)
    check_alike(read_state(fine_tuned), read_state(base), "the fine-tuned model", "its base")
    check_finite({"the fine-tuned model": read_state(fine_tuned)})
    inputs, kinds, notes = (
        find_example(example_inputs, options.get("data")),
        options.get("kinds", "permutation"),
        list[str](),
    )
    are_modules = all(isinstance(model, nn.Module) for model in (fine_tuned, base, to))
    if are_modules and inputs is not None and is_narrower(base, to):  # type: ignore[arg-type]
        fine_tuned, base = (widen(each, to, inputs) for each in (fine_tuned, base))  # type: ignore[arg-type]
        notes += [WIDENED]
    if imitation is not None:
        _check_imitation(imitation, fine_tuned, to, symmetry, kinds, scales, options.get("groups"))
    if kinds == "all" and symmetry is None:  # all three together: what stays in one of them stands in the way for all
        (fine_tuned, base, to), symmetry, changed = canonicalise([fine_tuned, base, to], inputs, options.get("data"))
        notes += changed
        if not (symmetry.scales or symmetry.bases):
            options["kinds"] = "permutation"
            notes += [f"There are no {WANTED[kinds]} in this symmetry."]
    if symmetry is not None and symmetry.bases:
        check_fixed(symmetry, read_state(fine_tuned))
    found = align(base, to, example_inputs, symmetry, method, init=init, seed=seed, **options)
    found = replace(found, notes=(*notes, *found.notes))
    if imitation is not None and (found.scales or found.matrices):
        found = _imitate(found, fine_tuned, base, imitation, options.get("progress", False), seed, scales[0])
    moved = (found.transform if found.scales or found.matrices else found.permutation).apply(fine_tuned)
    states = [read_state(found.target), read_state(moved), read_state(found.model)]
    buffers = _find_buffers(to)
    added = {each: _add(states, each, buffers) for each in scales}
    if len(scales) == 1:
        return Ported(_as_model(to, added[scales[0]]), found, scales[0])
    assert evaluate is not None
    with torch.no_grad():
        losses = {each: read_metrics(evaluate(_as_model(to, state)))["loss"] for each, state in added.items()}
    best = min(losses, key=lambda each: losses[each])
    return Ported(_as_model(to, added[best]), found, best, losses)


def _check_imitation(
    imitation: Imitation, tuned: Any, to: Any, symmetry: Symmetry | None, kinds: Kinds, scales: list[float], groups: Any
) -> None:
    if not isinstance(imitation, Imitation):
        raise TypeError(f"imitation must be an Imitation, got {type(imitation).__name__}")
    if not isinstance(tuned, nn.Module) or not isinstance(to, nn.Module):
        raise TypeError("an imitation calls the networks: give modules")
    if kinds == "permutation" if symmetry is None else not (symmetry.scales or symmetry.bases):
        raise ValueError('an imitation learns scales and changes of basis: ask for kinds="positive" or kinds="all"')
    if len(scales) > 1 or groups is not None:
        raise ValueError("an imitation learns all groups for one scale: leave out groups= and further scales")
    imitation.check(tuned, to)


def _imitate(
    found: Alignment[M], tuned: Any, base: Any, options: Imitation, progress: bool | Progress, seed: int, scale: float
) -> Alignment[M]:
    """The alignment with scales and bases that are learned for the port."""
    target = cast(nn.Module, found.target)
    with show_progress(progress) as show, seeded(seed, read_state(target).device):
        learned = learn_to_imitate(found.transform, tuned, read_state(base), target, options, show, scale)
    note = f"Scales and bases were learned further in {options.steps} steps of imitation; the cost is that before them."
    return replace(
        found,
        model=transform_model(base, learned),
        scales=learned.logarithms,
        matrices=learned.matrices,
        notes=(*found.notes, note),
    )


def _check_scales(scale: float | Sequence[float], evaluate: Evaluate | None, to: Model) -> list[float]:
    given = [scale] if isinstance(scale, int | float) else list(scale)
    if not given or not all(math.isfinite(each) for each in given):
        raise ValueError(f"scale must be a finite number, or several to choose from, got {scale}")
    scales = [float(each) for each in given]
    if len(scales) > 1 and (evaluate is None or not isinstance(to, nn.Module)):
        raise ValueError("to choose from several scales, give networks, and evaluate= to compare them by")
    return list(dict.fromkeys(scales))


def _find_buffers(model: Model) -> set[str]:
    if not isinstance(model, nn.Module):
        return {key for key in model if key.endswith(("running_mean", "running_var"))}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {key for key in model.state_dict() if key not in parameters}


def _add(states: Sequence[State], scale: float, buffers: set[str]) -> State:
    """The first state plus what the second one has more than the third."""
    return interpolate(states, [1, scale, -scale], {key: [1.0, 0.0, 0.0] for key in buffers})


def _as_model(model: Model, state: State) -> Any:
    return copy_with_state(model, state.load()) if isinstance(model, nn.Module) else state
