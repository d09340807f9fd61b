"""The canonical form of a network: gains of norms are folded into the layers around them, and means are subtracted.

A gain that can be folded is a scale of the symmetry: the gain is multiplied by s, and what reads the norm is divided by it.
With s = 1 / gain the gain becomes one. No list of architectures is needed, and what cannot be folded is left as it is.
Where a layer norm subtracts the mean over units, what writes these units gets the mean zero.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import find_example
from onebasin.matching.balancing import balance
from onebasin.matching.centring import Offsets, find_offsets
from onebasin.relaxation.objectives import each_tied_once, parameter_keys
from onebasin.symmetries import Scale, Symmetry, Transform
from onebasin.symmetries.layout import names
from onebasin.symmetries.multiplication import scale_shape, scaled_tensors
from onebasin.symmetries.verification import compare
from onebasin.tensors.states import StateDict, read_state_dict
from onebasin.torch_internals import tree_map
from onebasin.tracing import symmetry as trace

_TOLERANCE = 1e-9
Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class CanonicalForm(Generic[Network]):
    """What `canonical` made of a model.

    Attributes:
        model: a copy that computes the same function, its gains folded and its tensors centred.
        folded: the gains that are one now.
        left: for every other gain the reason why it is not.
        fold: what was done, to carry a LoRA or a task vector of the model along; None if that is more than positive scales:
            a gain was negative, or the model was balanced. Means need not be subtracted from such a difference.
        centred: the tensors from which the mean over units was subtracted, because nothing reads it.
        uncentred: for other tensors that write units of a layer norm the reason why it was not.
        untied: keys that were one tensor with another key and have a tensor of their own in `model`, if that was asked for.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> ob.canonical(model, torch.randn(3, 4)).centred
    ('0.weight', '0.bias')
    """

    model: Network
    folded: tuple[str, ...]
    left: Mapping[str, str]
    fold: Transform | None = None
    centred: tuple[str, ...] = ()
    uncentred: Mapping[str, str] = field(default_factory=dict)
    untied: tuple[str, ...] = ()

    @functools.cached_property
    def state(self) -> StateDict:
        """The state of `model`."""
        return read_state_dict(self.model)

    @property
    def notes(self) -> list[str]:
        """What was done, and what could not be and why, in sentences."""
        notes = []
        if self.folded:
            notes.append(f"{len(self.folded)} gains of norms were folded into the layers around them.")
        if self.centred:
            notes.append(f"The mean over units, which nothing reads, was subtracted from {len(self.centred)} tensors.")
        notes += [f"{key} has a tensor of its own now: it is tied to no other." for key in self.untied]
        notes += [f"The gain {key} stays, and what it multiplies is not mixed: {why}." for key, why in self.left.items()]
        notes += [f"{key} keeps the mean over its units: {why}." for key, why in self.uncentred.items()]
        return notes

    def __repr__(self) -> str:
        stays = {**self.left, **self.uncentred}
        left = f", left {', '.join(f'{key} ({reason})' for key, reason in stays.items())}" if stays else ""
        return f"CanonicalForm({len(self.folded)} gains folded, {len(self.centred)} tensors centred{left})"


def canonical(
    model: Network, example_inputs: Any, symmetry: Symmetry | None = None, balanced: bool = False, untie: bool = False
) -> CanonicalForm[Network]:
    """Fold the gains of norms into the layers around them, so that `onebasin.symmetry` finds changes of basis.

    Networks that differ in a constant that all units of a layer norm share become equal: the mean over units is subtracted
    from every tensor that may have one added, whatever the weights are.

    Args:
        model: left untouched.
        example_inputs: to trace it with, and to check that the function is the same.
        symmetry: of this model, with ``kinds="all"``, if it was traced before.
        balanced: also choose the scales of units, and the bases of heads, that make the parameters smallest: the sums of
            squares of what makes a unit and of what reads it are then the same.
        untie: give a head that is tied to the embedding a tensor of its own if a gain can be folded into it only then. In
            `CanonicalForm.model` they are two parameters, which `CanonicalForm.untied` names. Loaded into the tied module,
            its state would compute something else.

    Raises:
        ValueError: if the model cannot be traced.

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
    symmetry = trace(model, example_inputs, verify=False, kinds="all") if symmetry is None else symmetry
    untied = _untie(model, symmetry, example_inputs)
    if untie:
        model, symmetry = untied.model, untied.symmetry
    given = read_state_dict(model)
    start = StateDict({key: value.double() if value.is_floating_point() else value for key, value in given.items()})
    state, folded, left = start, [], {}
    logarithms: dict[str, Tensor] = {}
    for key in symmetry.gains:
        gain = state[key]
        if bool((gain == 1).all()):
            continue
        found = _find_scale(symmetry, key)
        if isinstance(found, str):
            left[key] = untied.reasons.get(key, found)
        elif not bool((gain != 0).all()) or not bool(gain.isfinite().all()):
            left[key] = "some of its entries are zero"
        else:
            logarithms[found.name] = _find_logarithms(symmetry, found, key, gain)
            state = _fold(symmetry, found, key, state, logarithms[found.name])
            folded.append(key)
    offsets = find_offsets(model, symmetry, example_inputs)
    uncentred = _explain(_trace_folded(model, state, example_inputs) if folded else symmetry, offsets)
    uncentred_state = state
    state, centred = _centre(offsets, state, given)
    if centred and not compare(model, start, state, example_inputs) < _TOLERANCE:
        uncentred |= dict.fromkeys(centred, "the means of these tensors are so large that the outputs are not exact to 1e-9")
        state, centred = uncentred_state, ()
    if balanced:
        state = _balance(model, state, example_inputs)
    is_checked = bool(centred) and not balanced
    if (folded or balanced) and not is_checked and not compare(model, start, state, example_inputs) < _TOLERANCE:
        raise ValueError("the canonical form of this model changes its function; please report this network")
    narrow = {key: value if state[key] is start[key] else state[key].to(value.dtype) for key, value in given.items()}
    is_positive = not balanced and all(bool((start[key] > 0).all()) for key in folded)
    fold = Transform(symmetry.identity(), logarithms) if is_positive else None
    result = copy.deepcopy(model)
    result.load_state_dict(_tie(symmetry, StateDict(narrow)))
    return CanonicalForm(result, tuple(folded), left, fold, centred, uncentred, untied.keys if untie else ())


@dataclass(frozen=True)
class _Untied(Generic[Network]):
    """A model in which tied tensors that hinder a fold are two, its symmetry, their keys, and why gains cannot be folded."""

    model: Network
    symmetry: Symmetry
    keys: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def _untie(model: Network, symmetry: Symmetry, example_inputs: Any) -> _Untied[Network]:
    """A copy with parameters of their own for tied keys, if that frees a gain; else the model itself."""
    state = read_state_dict(model)
    wanted = (key for key in symmetry.gains if not bool((state[key] == 1).all()))
    gains = [key for key in wanted if isinstance(_find_scale(symmetry, key), str)]
    if not gains or not symmetry.ties:
        return _Untied(model, symmetry)
    units = {name for key in gains for name in names(symmetry.layouts[key])}
    copied, keys = copy.deepcopy(model), []
    for first, *others in symmetry.ties:
        for key in others if not units.isdisjoint(names(symmetry.layouts[first])) else ():
            owner, _, name = key.rpartition(".")
            module, parameter = copied.get_submodule(owner), dict(copied.named_parameters(remove_duplicate=False)).get(key)
            if parameter is not None and module is not copied.get_submodule(first.rpartition(".")[0]):
                module.register_parameter(name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
                keys.append(key)
    if not keys:
        return _Untied(model, symmetry)
    found = trace(copied, example_inputs, verify=False, kinds="all")
    freed = [key for key in gains if isinstance(_find_scale(found, key), Scale)]
    reason = f"it would have to be folded into {', '.join(keys)}, which is one tensor with another that must not change; "
    reason += "untie=True of onebasin.canonical gives it a tensor of its own, and the model must then be untied to load that"
    return _Untied(copied, found, tuple(keys), dict.fromkeys(freed, reason)) if freed else _Untied(model, symmetry)


def _centre(offsets: Offsets, state: StateDict, given: Mapping[str, Any]) -> tuple[StateDict, tuple[str, ...]]:
    """A state without the means that nothing reads, and where there were some beyond the rounding of the given tensors."""
    centred = {key: offsets.subtract_means(key, state[key]) for key in offsets.axes}
    changed = {
        key: value
        for key, value in centred.items()
        if bool((value - state[key]).abs().max() > 8 * torch.finfo(given[key].dtype).eps * state[key].abs().max())
    }
    return _tie(offsets.symmetry, StateDict({**state, **changed})), tuple(changed)


def _explain(symmetry: Symmetry, offsets: Offsets) -> dict[str, str]:
    """Why tensors that write a stream which is rotated about its mean cannot be centred."""
    streams = [basis for basis in symmetry.bases.values() if basis.kind == "centred"]
    writers = (key for basis in streams for key, places in basis.places.items() if not all(p.is_dual for p in places))
    result = dict.fromkeys(writers, "the mean over its units is read: not every reader subtracts it")
    groups = offsets.groups
    for key, *others in symmetry.ties:
        if not groups.isdisjoint(names(symmetry.layouts[key])):
            result[key] = f"it is one tensor with {others[0]}, and one of the two may read the mean over its units"
        for other in others:
            result.pop(other, None)
    norms = {key.rpartition(".")[0] for key in symmetry.gains}  # their own offsets are added after the mean is subtracted
    return {key: why for key, why in result.items() if key not in offsets.axes and key.rpartition(".")[0] not in norms}


def _trace_folded(model: nn.Module, state: StateDict, example_inputs: Any) -> Symmetry:
    folded = copy.deepcopy(model).double()
    folded.load_state_dict(state)
    inputs = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, example_inputs)
    return trace(folded, inputs, verify=False, kinds="all")


def _balance(model: nn.Module, state: StateDict, example_inputs: Any) -> StateDict:
    symmetry = _trace_folded(model, state, example_inputs)
    keys = [key for key in each_tied_once(parameter_keys(model), symmetry) if key not in symmetry.fixed]
    return _tie(symmetry, balance(symmetry, state, keys).apply(state))


def canonicalise(
    models: Sequence[Any], example_inputs: Any, data: Iterable[Any] | None
) -> tuple[list[Any], Symmetry, list[str]]:
    """Copies of modules in canonical form, their symmetry of all kinds, and what was done, in sentences.

    Raises:
        ValueError: if these are no modules, or there is nothing to trace them with.
    """
    example_inputs = find_example(example_inputs, data)
    if example_inputs is None or not all(isinstance(model, nn.Module) for model in models):
        raise ValueError(
            "changes of basis are traced in the canonical forms of networks: give modules, and example_inputs= or data= to "
            "trace them with; or states in canonical form, and symmetry="
        )
    forms = [canonical(model, example_inputs) for model in models]
    copies = [form.model for form in forms]
    notes = dict.fromkeys(note for form in forms for note in form.notes)
    # A gain that stays in any of the models stands in the way for all.
    found = [trace(each, example_inputs, kinds="all") for each in copies]
    shared = frozenset.intersection(*(frozenset(each.fixed) for each in found))
    symmetry = next((each for each in found if each.fixed.keys() == shared), None)
    if symmetry is None:  # each of them has gains that are one where another has none
        symmetry = trace(_unfix(copies[0], found[0].fixed.keys() - shared), example_inputs, kinds="all")
    return copies, symmetry, list(notes)


def _unfix(model: nn.Module, keys: Iterable[str]) -> nn.Module:
    """A copy in which some vectors are not filled with one number."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        for key in keys:
            vector = result.get_parameter(key)
            vector.copy_(torch.linspace(1, 2, len(vector)))
    return result


def _find_scale(symmetry: Symmetry, key: str) -> Scale | str:
    """The scale that multiplies a gain and no other; or why there is none."""
    scales = [scale for scale in symmetry.scales.values() if key in scale.powers]
    if len(scales) != 1:
        return "it cannot be multiplied without changing what reads it" if not scales else "several scales multiply it"
    others = [other for other in symmetry.gains if other != key and other in scales[0].powers]
    if others:
        return f"it shares its scale with {others[0]}"
    (power,) = scales[0].powers[key]
    return scales[0] if power.exponent in (1, -1) else "it is not multiplied by its scale alone"


def _find_logarithms(symmetry: Symmetry, scale: Scale, key: str, gain: Tensor) -> Tensor:
    """The logarithms of the scale that makes the absolute values of a gain one."""
    ((_, _, exponent),) = scale.powers[key]
    return -gain.double().cpu().abs().log().view(scale_shape(symmetry, scale)) / exponent


def _fold(symmetry: Symmetry, scale: Scale, key: str, state: StateDict, logarithms: Tensor) -> StateDict:
    """A state whose gain is one. Logarithms are of absolute values, so signs are multiplied by themselves."""
    is_negative = (state[key] < 0).double().cpu().view_as(logarithms)
    tensors = scaled_tensors(symmetry)
    result: dict[str, Any] = dict(state)
    for name in scale.powers:
        flipped = tensors.scale(name, torch.ones_like(state[name]), {scale.name: is_negative}) != 1
        value = tensors.scale(name, state[name], {scale.name: logarithms})
        result[name] = torch.where(flipped, -value, value)
    result[key] = torch.ones_like(state[key])
    return _tie(symmetry, StateDict(result))


def _tie(symmetry: Symmetry, state: StateDict) -> StateDict:
    """Tied keys are one tensor again."""
    first: dict[str, Any] = {}
    for keys in symmetry.ties:
        first |= dict.fromkeys(keys, state[keys[0]])
    return StateDict({key: first.get(key, value) for key, value in state.items()})
