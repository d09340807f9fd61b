"""Tied tensors that a gain cannot be folded into: a copy of the network in which they are tensors of their own."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic

from torch import nn

from onebasin.matching.gain_folding import find_scales, read_gain
from onebasin.matching.skeletons import Network, Skeleton, copy_structure
from onebasin.symmetries import Symmetry
from onebasin.symmetries.layout import names
from onebasin.symmetries.verification import compare
from onebasin.tensors.states import State, Ties

TIES_WORDS = "tie_word_embeddings"
"""The entry of a configuration of Hugging Face that says whether the head is the embedding."""
_TOLERANCE = 1e-9
_OFFER = (
    "it would have to be folded into {keys}, which is one tensor with another that must not change: give --untie "
    f"(untie=True in Python), which needs {TIES_WORDS}: false in a configuration of Hugging Face"
)
_DIFFERENT = (
    "it would have to be folded into {keys}, which is one tensor with another that must not change, and the model computes "
    "something else if they are untied"
)


@dataclass(frozen=True)
class Untied(Generic[Network]):
    """A network in which no tie hinders the fold of a gain, if that can be.

    Attributes:
        skeleton: of a copy in which some tied keys are parameters of their own; the given one if that frees no gain.
        symmetry: of that.
        keys: the keys that are no longer tied.
        reasons: for gains that can be folded in no model, or in the untied one alone, why that is.
    """

    skeleton: Skeleton[Network]
    symmetry: Symmetry
    keys: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def untie(skeleton: Skeleton[Network], symmetry: Symmetry, state: State) -> Untied[Network]:
    """Untie what stands in the way of a gain that is not one.

    Args:
        skeleton: of a model.
        symmetry: of this model, of all kinds.
        state: of this model. Gains are read, and all of it if it can be untied: to see that it computes the same.
    """
    blocked = _find_blocked(symmetry, state)
    keys = _find_tied(skeleton.module, symmetry, blocked)
    if not keys:
        return Untied(skeleton, symmetry)
    split = split_tied(skeleton, keys)
    found = split.trace(split.find_constants(state))
    freed = [key for key in blocked if not isinstance(find_scales(found, key), str)]
    if not freed:
        return Untied(skeleton, symmetry)
    listed = ", ".join(keys)
    if not compare(skeleton.functions, state, state, split.functions) < _TOLERANCE:
        return Untied(skeleton, symmetry, reasons=dict.fromkeys(freed, _DIFFERENT.format(keys=listed)))
    return Untied(split, found, keys, dict.fromkeys(freed, _OFFER.format(keys=listed)))


def split_tied(skeleton: Skeleton[Network], keys: Collection[str]) -> Skeleton[Network]:
    """The skeleton of a copy in which some tied keys are parameters of their own, of the same values.

    If a module in it has a configuration of Hugging Face, that says so, and `save_pretrained` writes what was made.
    """
    place = tuple(sorted(keys))
    if place in skeleton.splits:
        return skeleton.splits[place]
    result = copy_structure(skeleton.module)
    parameters = dict(result.named_parameters(remove_duplicate=False))
    for key in keys:
        owner, _, name = key.rpartition(".")
        own = nn.Parameter(copy.deepcopy(parameters[key].detach()), parameters[key].requires_grad)
        result.get_submodule(owner).register_parameter(name, own)
    for module in result.modules():
        configuration = getattr(module, "config", None)
        if getattr(configuration, TIES_WORDS, False) is True:
            setattr(configuration, TIES_WORDS, False)
    skeleton.splits[place] = Skeleton(result, skeleton.example_inputs)
    return skeleton.splits[place]


def list_untied(before: Ties, after: Ties) -> tuple[str, ...]:
    """The keys that were one tensor with an earlier key, and are not any more.

    >>> list_untied((("embed", "head"), ("a", "b", "c")), (("a", "b"),))
    ('head', 'c')
    """
    first = {key: keys[0] for keys in after for key in keys}
    return tuple(key for keys in before for key in keys[1:] if first.get(key, key) != first.get(keys[0], keys[0]))


def _find_blocked(symmetry: Symmetry, state: State) -> list[str]:
    """The gains that are not one and have no scale."""
    gains = ((key, read_gain(symmetry, key, state)) for key in symmetry.gains)
    wanted = [key for key, gain in gains if gain is not None and not bool((gain == 1).all())]
    return [key for key in wanted if isinstance(find_scales(symmetry, key), str)]


def _find_tied(model: nn.Module, symmetry: Symmetry, gains: Collection[str]) -> tuple[str, ...]:
    """Tied keys along the units of some gains that can have a parameter of their own: another module holds the first one."""
    units = {name for key in gains for name in names(symmetry.layouts[key])}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for first, *others in symmetry.ties:
        holder = model.get_submodule(first.rpartition(".")[0])
        is_met = not units.isdisjoint(names(symmetry.layouts[first]))
        for key in others if is_met else ():
            if key in parameters and model.get_submodule(key.rpartition(".")[0]) is not holder:
                found.append(key)
    return tuple(found)
