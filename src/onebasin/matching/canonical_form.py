"""The canonical form of a network: gains of norms are folded into the layers around them, and means are subtracted.

What cannot be folded is left as it is. Where a layer norm subtracts the mean over units, what writes these units gets the
mean zero.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import find_example
from onebasin.matching.balancing import balance
from onebasin.matching.centring import Offsets, find_offsets
from onebasin.matching.gain_folding import fold_gains, tie
from onebasin.matching.untying import TIES_WORDS, Network, split_tied
from onebasin.matching.untying import untie as find_untied
from onebasin.relaxation.objectives import each_tied_once, parameter_keys
from onebasin.symmetries import Symmetry, Transform
from onebasin.symmetries.layout import names
from onebasin.symmetries.verification import compare
from onebasin.tensors.states import StateDict, read_state_dict
from onebasin.torch_internals import tree_map
from onebasin.tracing import symmetry as trace

_TOLERANCE = 1e-9


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
            notes.append(f"{len(self.folded)} gains of norms were folded into the layers around them.")
        if self.centred:
            notes.append(f"The mean over units, which nothing reads, was subtracted from {len(self.centred)} tensors.")
        needed = f"it needs {TIES_WORDS}: false in a configuration of Hugging Face"
        notes += [f"{key} has a tensor of its own now, and is tied to no other: {needed}." for key in self.untied]
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
            `CanonicalForm.model` they are two parameters, which `CanonicalForm.untied` names; if it has a configuration of
            Hugging Face, that says ``tie_word_embeddings=False``. Loaded into the tied module, its state would compute
            something else.

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
    untied = find_untied(model, symmetry, example_inputs)
    if untie:
        model, symmetry = untied.model, untied.symmetry
    given = read_state_dict(model)
    start = StateDict({key: value.double() if value.is_floating_point() else value for key, value in given.items()})
    folded = fold_gains(symmetry, start, untied.reasons)
    offsets = find_offsets(model, symmetry, example_inputs)
    uncentred = _explain(_trace_folded(model, folded.state, example_inputs) if folded.keys else symmetry, offsets)
    state, centred = _centre(offsets, folded.state, given)
    if centred and not compare(model, start, state, example_inputs) < _TOLERANCE:
        uncentred |= dict.fromkeys(centred, "the means of these tensors are so large that the outputs are not exact to 1e-9")
        state, centred = folded.state, ()
    if balanced:
        state = _balance(model, state, example_inputs)
    is_checked = bool(centred) and not balanced
    if (folded.keys or balanced) and not is_checked and not compare(model, start, state, example_inputs) < _TOLERANCE:
        raise ValueError("the canonical form of this model changes its function; please report this network")
    narrow = {key: value if state[key] is start[key] else state[key].to(value.dtype) for key, value in given.items()}
    fold = Transform(symmetry.identity(), folded.logarithms) if folded.is_positive and not balanced else None
    result = copy.deepcopy(model)
    result.load_state_dict(tie(symmetry, StateDict(narrow)))
    keys = untied.keys if untie else ()
    return CanonicalForm(result, folded.keys, folded.left, fold, centred, uncentred, keys)


def _centre(offsets: Offsets, state: StateDict, given: Mapping[str, Any]) -> tuple[StateDict, tuple[str, ...]]:
    """A state without the means that nothing reads, and where there were some beyond the rounding of the given tensors."""
    centred = {key: offsets.subtract_means(key, state[key]) for key in offsets.axes}
    changed = {
        key: value
        for key, value in centred.items()
        if bool((value - state[key]).abs().max() > 8 * torch.finfo(given[key].dtype).eps * state[key].abs().max())
    }
    return tie(offsets.symmetry, StateDict({**state, **changed})), tuple(changed)


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
    return tie(symmetry, balance(symmetry, state, keys).apply(state))


def canonicalise(
    models: Sequence[Any], example_inputs: Any, data: Iterable[Any] | None, untie: bool = False
) -> tuple[list[Any], Symmetry, dict[str, list[int]]]:
    """Copies of modules in canonical form, their symmetry of all kinds, and what was done.

    The last is sentences, each with the numbers of the models that it is about. What is untied in one of them is untied in
    all.

    Raises:
        ValueError: if these are no modules, or there is nothing to trace them with.
    """
    example_inputs = find_example(example_inputs, data)
    if example_inputs is None or not all(isinstance(model, nn.Module) for model in models):
        raise ValueError(
            "changes of basis are traced in the canonical forms of networks: give modules, and example_inputs= or data= to "
            "trace them with; or states in canonical form, and symmetry="
        )
    forms = [canonical(model, example_inputs, untie=untie) for model in models]
    apart = {key for form in forms for key in form.untied}
    for number, form in enumerate(forms):
        if set(form.untied) != apart:
            forms[number] = canonical(split_tied(models[number], apart), example_inputs)
    copies = [form.model for form in forms]
    notes: dict[str, list[int]] = {}
    for number, form in enumerate(forms):
        for note in form.notes:
            notes.setdefault(note, []).append(number)
    # A gain that stays in any of the models stands in the way for all.
    found = [trace(each, example_inputs, kinds="all") for each in copies]
    shared = frozenset.intersection(*(frozenset(each.fixed) for each in found))
    symmetry = next((each for each in found if each.fixed.keys() == shared), None)
    if symmetry is None:  # each of them has gains that are one where another has none
        symmetry = trace(_unfix(copies[0], found[0].fixed.keys() - shared), example_inputs, kinds="all")
    return copies, symmetry, notes


def _unfix(model: nn.Module, keys: Iterable[str]) -> nn.Module:
    """A copy in which some vectors are not filled with one number."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        for key in keys:
            vector = result.get_parameter(key)
            vector.copy_(torch.linspace(1, 2, len(vector)))
    return result
