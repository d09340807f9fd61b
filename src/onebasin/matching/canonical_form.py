"""The canonical form of a network: gains of norms are folded into the layers around them, and means are subtracted.

What cannot be folded is left as it is. Where a layer norm subtracts the mean over units, what writes these units gets the
mean zero. Gains are folded first: one that multiplies what is written to a stream hides that its mean is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, cast

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import copy_with_state, find_example
from onebasin.matching.balancing import balance
from onebasin.matching.centring import Offsets
from onebasin.matching.checks import check_module
from onebasin.matching.gain_folding import FoldedGains, fold_gains, read_gain
from onebasin.matching.skeletons import Skeleton, check_fits
from onebasin.matching.untying import TIES_WORDS, split_tied
from onebasin.matching.untying import untie as find_untied
from onebasin.relaxation.objectives import each_tied_once, parameter_keys
from onebasin.symmetries import Symmetry, Transform
from onebasin.symmetries.layout import names
from onebasin.symmetries.verification import compare
from onebasin.tensors.comparison import check_finite
from onebasin.tensors.gradient_mode import computing_gradients
from onebasin.tensors.states import LazyState, M, State, StateDict, read_state

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class CanonicalForm(Generic[M]):
    """What `canonical` made of a model.

    Attributes:
        model: a copy that computes the same function, its gains folded and its tensors centred (of a state dict a state
            dict; of a lazy state a lazy one, whose tensors are folded when they are read).
        folded: the gains that are one now.
        left: for every other gain the reason why it is not.
        fold: what was done, to carry a LoRA or a task vector of the model along; None if that is more than positive scales:
            a gain was negative, or the model was balanced. Means need not be subtracted from such a difference if it
            leaves the gains as they are. A model whose gains have changed too needs a canonical form of its own.
        centred: the tensors from which the mean over units was subtracted, because nothing reads it.
        uncentred: for other tensors that write a stream which is rotated about its mean the reason why it was not. If a gain
            stays, the stream is not rotated, and of its tensors only tied ones are named.
        untied: keys that were one tensor with another key and have a tensor of their own in `model`, if that was asked for.
            A module must be built untied to load `state`; `configuration` says how.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> ob.canonical(model, torch.randn(3, 4)).centred
    ('0.weight', '0.bias')
    """

    model: M
    folded: tuple[str, ...]
    left: Mapping[str, str]
    fold: Transform | None = None
    centred: tuple[str, ...] = ()
    uncentred: Mapping[str, str] = field(default_factory=dict)
    untied: tuple[str, ...] = ()

    @functools.cached_property
    def state(self) -> State:
        """The state of `model`: of a lazy one itself, else an ordinary dict."""
        return read_state(self.model)

    @property
    def configuration(self) -> dict[str, bool]:
        """What a configuration of Hugging Face must say to load `state`; empty if the given one is right.

        That of `model` says so already.
        """
        return {TIES_WORDS: False} if self.untied else {}

    @property
    def notes(self) -> list[str]:
        """What was done, and what could not be and why, in sentences."""
        notes = []
        if self.folded:
            count = len(self.folded)
            what = "A gain of a norm was" if count == 1 else f"{count} gains of norms were"
            notes.append(f"{what} folded into the layers around {'it' if count == 1 else 'them'}.")
        if self.centred:
            what = self.centred[0] if len(self.centred) == 1 else f"{len(self.centred)} tensors"
            notes.append(f"The mean over units, which nothing reads, was subtracted from {what}.")
        needed = f"it needs {TIES_WORDS}: false in a configuration of Hugging Face"
        notes += [f"{key} has a tensor of its own now, and is tied to no other: {needed}." for key in self.untied]
        notes += [f"The gain {key} stays, and what it multiplies is not mixed: {why}." for key, why in self.left.items()]
        notes += [f"{key} keeps the mean over its units: {why}." for key, why in self.uncentred.items()]
        return notes

    def __repr__(self) -> str:
        stays = {**self.left, **self.uncentred}
        left = f", left {', '.join(f'{key} ({reason})' for key, reason in stays.items())}" if stays else ""
        return f"CanonicalForm({len(self.folded)} gains folded, {len(self.centred)} tensors centred{left})"


@computing_gradients
def canonical(
    model: M,
    example_inputs: Any,
    symmetry: Symmetry | None = None,
    balanced: bool = False,
    untie: bool = False,
    module: nn.Module | None = None,
) -> CanonicalForm[M]:
    """Fold the gains of norms into the layers around them, so that `onebasin.symmetry` finds changes of basis.

    Then the mean over the units of a group is subtracted from every tensor to which a constant can be added along them
    without changing the function, whatever the other weights are while gains of one stay one. So networks that differ in
    such constants alone, once their gains are folded, become equal up to rounding. The tensors are found by gradients: of a
    model that has none they stay. `CanonicalForm.notes` says what was done, and what could not be and why.

    Args:
        model: a module; or, with `module`, a state dict or a lazy state, of which a few tensors are in memory at a time. It
            is left untouched.
        example_inputs: to trace it with, and to check that the function is the same.
        symmetry: of this model, with ``kinds="all"``, if it was traced before.
        balanced: also choose the scales of units, and the bases of heads, that make the parameters smallest: the sums of
            squares of what makes a unit and of what reads it are then the same.
        untie: give a head that is tied to the embedding a tensor of its own if a gain can be folded into it only then. In
            `CanonicalForm.model` they are two parameters, which `CanonicalForm.untied` names; if it has a configuration of
            Hugging Face, that says ``tie_word_embeddings=False``. Loaded into the tied module, its state would compute
            something else.
        module: of a state, the architecture. Its weights are not used: see
            `onebasin.checkpoints.Architecture.build_hollow`.

    Raises:
        ValueError: if the model cannot be traced or its tensors hold NaN or infinity, or the state is not one of the module.
        TypeError: if the module is none.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> _ = model[1].weight.data.uniform_(0.5, 2)
    >>> x = torch.randn(3, 4)
    >>> form = ob.canonical(model, x)
    >>> form.folded, form.model[1].weight.tolist()
    (('1.weight',), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    >>> torch.allclose(form.model(x), model(x), atol=1e-5)
    True
    """
    check_module(module)
    if module is None and not isinstance(model, nn.Module):
        raise ValueError("the canonical form of a state is found by tracing: give module=, a module of its architecture")
    if balanced and not isinstance(model, nn.Module):
        raise ValueError("balanced=True needs all tensors in memory: give the module with its weights")
    if isinstance(model, nn.Module):
        check_finite({"the model": read_state(model)})
    traced: Any = model if isinstance(model, nn.Module) else module
    skeleton, form = _find(Skeleton(traced, example_inputs), read_state(model), symmetry, balanced, untie)
    return cast(Any, replace(form, model=_fill(model, skeleton, form.state)))


def _fill(model: M, skeleton: Skeleton[Any], state: State) -> M:
    """A state as what was given: a state, or a module like the one that was traced."""
    if not isinstance(model, nn.Module):
        return cast(M, state)
    return cast(M, copy_with_state(skeleton.module, state))


@dataclass(frozen=True)
class _Canonicaliser:
    """Takes the tensors of a state into canonical form, one by one: gains are folded, and means subtracted.

    Attributes:
        folded: how to fold the gains.
        offsets: where means can be subtracted.
        centred: the tensors from which they are subtracted, each tied one once.
    """

    folded: FoldedGains
    offsets: Offsets
    centred: tuple[str, ...] = ()

    @property
    def is_needed(self) -> bool:
        """Whether any tensor is changed."""
        return bool(self.folded.keys or self.centred)

    def move(self, key: str, value: Tensor) -> Tensor:
        """A tensor of the state, computed in float64; the tensor itself if nothing is done to it."""
        if not value.is_floating_point():
            return value
        first = next((keys[0] for keys in self.offsets.symmetry.ties if key in keys), key)
        wide = value.double()
        moved = self.folded.move(first, wide)
        if first in self.centred:
            moved = self.offsets.subtract_means(first, moved)
        return value if moved is wide else moved.to(value.dtype)


def _find(
    skeleton: Skeleton[Any],
    given: State,
    symmetry: Symmetry | None = None,
    balanced: bool = False,
    untie: bool = False,
    verify: bool = False,
) -> tuple[Skeleton[Any], CanonicalForm[State]]:
    """The canonical form of a state, and the skeleton of the network that it belongs to, which may be untied."""
    check_fits(given, skeleton.module)
    symmetry = skeleton.trace(skeleton.find_constants(given)) if symmetry is None else symmetry
    symmetry.bind(given)
    untied = find_untied(skeleton, symmetry, given)
    if untie:
        skeleton, symmetry, given = untied.skeleton, untied.symmetry, _separate(given, untied.keys)
    given = given.tie(symmetry.ties)
    # Computed where it is read, so that no second model is held.
    start = given.lazily().to(read_state(skeleton.module).device).map(_widen)
    whole, too_large = _find_exact(skeleton, symmetry, given, start, untied.reasons)
    state, moved = given.map(whole.move), start.map(whole.move)
    after = skeleton.trace(skeleton.find_constants(moved), verify) if whole.is_needed else symmetry
    if balanced:
        held = moved.load().tie(symmetry.ties)
        keys = [key for key in each_tied_once(parameter_keys(skeleton.module), after) if key not in after.fixed]
        smallest = balance(_keep_gains(after, held), held, keys).apply(held)
        _check_exact(compare(skeleton.functions, start, smallest))
        state = given.map(functools.partial(_take, smallest))
    return skeleton, CanonicalForm(
        state,
        folded=whole.folded.keys,
        left=whole.folded.left,
        fold=Transform(symmetry.identity(), whole.folded.logarithms) if whole.folded.is_positive and not balanced else None,
        centred=whole.centred,
        uncentred=_explain(after, whole.offsets) | too_large,
        untied=untied.keys if untie else (),
    )


def _find_exact(
    skeleton: Skeleton[Any], symmetry: Symmetry, given: State, start: State, reasons: Mapping[str, str]
) -> tuple[_Canonicaliser, dict[str, str]]:
    """What makes a state canonical, and leaves its function alone; and for tensors whose means are too large why they stay.

    Args:
        skeleton: of the network.
        symmetry: of the network, where gains are not one.
        given: the state.
        start: the state in float64.
        reasons: for some gains that have no scale of their own why that is.
    """

    def make(rigid: Collection[str] = ()) -> _Canonicaliser:
        folded = fold_gains(symmetry, given, reasons, rigid)
        plain = _Canonicaliser(folded, skeleton.find_offsets(folded.ones))
        return replace(plain, centred=_list_centred(plain, given))

    def measure(move: Callable[[str, Tensor], Tensor]) -> float:
        return compare(skeleton.functions, start, start.map(move))

    whole = make()
    if not whole.is_needed or measure(whole.move) < _TOLERANCE:
        return whole, {}
    # A ReLU lets positive factors through, and no signs.
    rigid = [key for key in whole.folded.negative if not measure(whole.folded.only(key).move) < _TOLERANCE]
    if rigid:
        whole = make(rigid)
        if not whole.is_needed or measure(whole.move) < _TOLERANCE:
            return whole, {}
    plain = replace(whole, centred=())
    if plain.is_needed:
        _check_exact(measure(plain.move))
    why = "the means of these tensors are so large that the outputs are not exact to 1e-9"
    return plain, dict.fromkeys(whole.centred, why)


def _check_exact(difference: float) -> None:
    if not difference < _TOLERANCE:
        raise ValueError("the canonical form of this model changes its function; please report this network")


def _keep_gains(symmetry: Symmetry, state: State) -> Symmetry:
    """A symmetry without the scales that multiply gains which are one."""
    gains = {key: read_gain(symmetry, key, state) for key in symmetry.gains}
    ones = {key for key, gain in gains.items() if gain is not None and bool((gain == 1).all())}
    return replace(symmetry, scales={n: s for n, s in symmetry.scales.items() if s.powers.keys().isdisjoint(ones)})


def _widen(key: str, value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _take(state: Mapping[str, Tensor], key: str, value: Tensor) -> Tensor:
    """The tensor of another state in the type of a value."""
    return state[key].to(value.dtype)


def _separate(state: State, keys: Iterable[str]) -> State:
    """A state in which some tied keys hold tensors of their own; those of a lazy state are read anew each time anyway."""
    if isinstance(state, LazyState):
        own = {key: torch.empty_like(state.shapes[key]) for key in keys}  # tied keys have one tensor for their shape
        return LazyState({**state.shapes, **own}, state.read, state.device)
    return StateDict({**state, **{key: state[key].clone() for key in keys}})


def _list_centred(plain: _Canonicaliser, given: State) -> tuple[str, ...]:
    """The tensors that have means which nothing reads, beyond the rounding of what was given."""
    found = []
    for key in plain.offsets.axes:
        value = given[key]
        folded = plain.move(key, value.double())
        change = (plain.offsets.subtract_means(key, folded) - folded).abs().max()
        if bool(change > 8 * torch.finfo(value.dtype).eps * folded.abs().max()):
            found.append(key)
    return tuple(found)


def _explain(symmetry: Symmetry, offsets: Offsets) -> dict[str, str]:
    """Why tensors that write a stream which is rotated about its mean cannot be centred."""
    streams = [basis for basis in symmetry.bases.values() if basis.kind == "centred"]
    writers = (key for basis in streams for key, places in basis.places.items() if not all(p.is_dual for p in places))
    result = dict.fromkeys(writers, offsets.obstacle or "some layer that reads them does not subtract it")
    groups = offsets.groups
    for key, *others in symmetry.ties:
        if not groups.isdisjoint(names(symmetry.layouts[key])):
            result[key] = f"it is one tensor with {others[0]}, and one of the two may read the mean over its units"
        for other in others:
            result.pop(other, None)
    norms = {key.rpartition(".")[0] for key in symmetry.gains}  # their own offsets are added after the mean is subtracted
    return {key: why for key, why in result.items() if key not in offsets.axes and key.rpartition(".")[0] not in norms}


def canonicalise(
    models: Sequence[Any],
    example_inputs: Any,
    data: Iterable[Any] | None,
    untie: bool = False,
    module: nn.Module | None = None,
) -> tuple[list[Any], Symmetry, dict[str, list[int]]]:
    """Copies of models in canonical form, their symmetry of all kinds, and what was done.

    The last is sentences, each with the numbers of the models that it is about. What is untied in one of them is untied in
    all. States, whose architecture is that of `module`, become states, and lazy ones lazy ones.

    Raises:
        ValueError: if there are states and no module, or there is nothing to trace them with.
    """
    example_inputs = find_example(example_inputs, data)
    if example_inputs is None or (module is None and not all(isinstance(model, nn.Module) for model in models)):
        raise ValueError(
            "changes of basis are traced in the canonical forms of networks: give modules, or states and module=, and "
            "example_inputs= or data= to trace them with; or states in canonical form, and symmetry="
        )
    shared: Any = None if module is None else Skeleton(module, example_inputs)
    skeletons = [Skeleton(model, example_inputs) if isinstance(model, nn.Module) else shared for model in models]
    pairs = list(zip(skeletons, map(read_state, models), strict=True))
    found = [_find(skeleton, state, untie=untie, verify=True) for skeleton, state in pairs]
    apart = sorted({key for _, form in found for key in form.untied})
    for number, (skeleton, state) in enumerate(pairs):
        if set(found[number][1].untied) != set(apart):
            found[number] = _find(split_tied(skeleton, apart), _separate(state, apart), verify=True)
    notes: dict[str, list[int]] = {}
    for number, (_, form) in enumerate(found):
        for note in form.notes:
            notes.setdefault(note, []).append(number)
    # A gain that stays in any of the models stands in the way for all.
    constants = [set(skeleton.find_constants(form.state).items()) for skeleton, form in found]
    symmetry = found[0][0].trace(dict(set.intersection(*constants)), verify=True)
    copies = [_fill(model, skeleton, form.state) for model, (skeleton, form) in zip(models, found, strict=True)]
    return copies, symmetry, notes
