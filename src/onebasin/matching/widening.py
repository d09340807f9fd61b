"""A network in the width of a wider one: the same function, with units that are not used.

A unit that reads nothing, and that nothing reads, changes no sum. So the tensors of a network, padded with zeros along the
axes of its groups, compute what they did, unless something counts the units. Two things do, and are allowed for:

- A norm takes a mean over the N units of a stream. Where the stream is made, its mean over the units is taken off if the
  norm does so too, and it is multiplied by c = sqrt(M / N): its mean square over M units is then what it was over N. Where
  it is read, it is divided by c, in the gains of the norms if they have any. Where that fails, as for a stream that goes on
  behind its norm, and M is a multiple of N, every unit is repeated instead, which changes no mean, and is divided where it
  is read.
- Attention divides by the root of the number of units, d, of queries and keys: queries are multiplied by sqrt(D / d).

Whether that is all for a given network is not argued but checked: the outputs of both networks are compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import copy_with_state
from onebasin.symmetries import Basis, Symmetry
from onebasin.symmetries.basis_matrices import MixedTensors, pair
from onebasin.symmetries.layout import Factor, Product, Sum, Switch, Term
from onebasin.symmetries.multiplication import matrix_shape
from onebasin.symmetries.verification import compare_models
from onebasin.tensors.comparison import check_finite
from onebasin.tensors.states import StateDict, read_state, read_state_dict
from onebasin.torch_internals import tree_map
from onebasin.tracing import symmetry as trace

Wide = TypeVar("Wide", bound=nn.Module)
"""The class of the wide network."""
_TOLERANCE = 1e-9


def widen(model: nn.Module, like: Wide, example_inputs: Any) -> Wide:
    """A network as wide as another one that computes what this one does.

    Every group of units grows to the size that it has in `like`. New units are zero. Norms over the units and the scale of
    attention are allowed for. The outputs of both networks are compared in float64 before anything is returned.

    Args:
        model: the narrow network; it is left untouched.
        like: a network of the same architecture with at least as many units in every group. Its weights do not matter.
        example_inputs: to trace and to compare both with; see `onebasin.symmetry`.

    Returns:
        A copy of `like` with weights made from those of `model`.

    Raises:
        ValueError: if the two differ in more than the number of free units, or if the function would change.
        TypeError: if one of them is no module.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> narrow, wide = (nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, 2)) for n in (8, 12))
    >>> x = torch.randn(1, 4)
    >>> torch.allclose(ob.widen(narrow, like=wide, example_inputs=x)(x), narrow(x), atol=1e-6)
    True
    """
    for name, each in {"model": model, "like": like}.items():
        if not isinstance(each, nn.Module):
            raise TypeError(f"widen takes networks, but {name} is a {type(each).__name__}")
    check_finite({"the model to widen": read_state(model)})
    _check_keys(model, like)
    double, wider = (copy.deepcopy(each).double() for each in (model, like))
    inputs = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, example_inputs)
    norms = _find_norms(model)
    narrow, wide = (_trace(each, inputs) for each in (double, wider))
    grown = _pair_groups(narrow, wide)
    state, least = read_state_dict(double), math.inf
    for recipe in _propose(narrow, grown, norms):
        padded = _pad(_correct(state, narrow, recipe, norms), narrow, wide, recipe, norms)
        wider.load_state_dict(padded)
        least = min(least, compare_models(double, wider, inputs))
        if least < _TOLERANCE:
            return copy_with_state(like, padded)  # which rounds to the types of `like`
    raise ValueError(
        f"more units change the outputs of this network by {least:.1e} (relative): something in it counts units in a way "
        "that is not allowed for, such as a norm over groups of channels"
    )


def is_narrower(model: nn.Module, like: nn.Module) -> bool:
    """Whether two networks have the same tensors, and some axes of the first are shorter and none is longer."""
    ours, theirs = (read_state(each).shapes for each in (model, like))
    if ours.keys() != theirs.keys() or any(ours[key].dim() != theirs[key].dim() for key in ours):
        return False
    pairs = [pair for key in ours for pair in zip(ours[key].shape, theirs[key].shape, strict=True)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


@dataclass(frozen=True)
class _Norms:
    """The state keys of the parameters of all norms.

    Attributes:
        gains: what the norms multiply by.
        offsets: what they add.
    """

    gains: frozenset[str]
    offsets: frozenset[str]


def _find_norms(model: nn.Module) -> _Norms:
    gains, offsets = set(), set()
    for prefix, module in model.named_modules():
        if "norm" in type(module).__name__.lower():
            for name, value in module.named_parameters(recurse=False):
                key = f"{prefix}.{name}" if prefix else name
                if value.dim() == 1:
                    (offsets if name in ("bias", "beta", "offset") else gains).add(key)
    return _Norms(frozenset(gains), frozenset(offsets))


def _trace(model: nn.Module, example_inputs: Any) -> Symmetry:
    """The symmetry of a network with its gains set to one, so that its streams are found as bases."""
    plain = copy.deepcopy(model)
    gains = _find_norms(model).gains
    with torch.no_grad():
        for key, value in plain.named_parameters():
            if key in gains:
                value.fill_(1)
    return trace(plain, example_inputs, verify=False, kinds="all")


def _check_keys(model: nn.Module, like: nn.Module) -> None:
    ours, theirs = (set(each.state_dict()) for each in (model, like))
    for key in sorted(ours ^ theirs):
        owner, other = ("the model to widen", "like") if key in ours else ("like", "the model to widen")
        raise ValueError(f"{owner} has {key!r}, which {other} has not: they differ in more than their width")


def _pair_groups(narrow: Symmetry, wide: Symmetry) -> dict[str, int]:
    """The groups that grow, by their names in the narrow network, and their sizes in the wide one.

    Raises:
        ValueError: naming the first axis on which the two differ in more than the size of a group.
    """
    partners: dict[str, str] = {}
    grown: dict[str, int] = {}
    for key, layout in narrow.layouts.items():
        if len(layout) != len(wide.layouts[key]):
            raise ValueError(f"{key!r} has {len(layout)} axes in the model to widen and {len(wide.layouts[key])} in like")
        for axis, terms in enumerate(zip(layout, wide.layouts[key], strict=True)):
            where = (
                f"axis {axis} of {key!r}, with {terms[0].size} entries in the model to widen and {terms[1].size} in like,"
            )
            for ours, theirs in _pair_factors(*terms, where):
                is_free = ours.name in narrow.groups and theirs.name in wide.groups
                if is_free and partners.setdefault(ours.name or "", theirs.name or "") != theirs.name:
                    raise ValueError(f"{where} holds units that are one group in one of them and two in the other")
                if ours.size == theirs.size:
                    continue
                if not is_free:
                    raise ValueError(f"{where} has parts that are not free units, and so cannot grow")
                if ours.size > theirs.size:
                    raise ValueError(f"{where} would have to shrink: widen the other model to this one")
                grown[ours.name or ""] = theirs.size
    return grown


def _pair_factors(ours: Term, theirs: Term, where: str) -> Iterator[tuple[Factor, Factor]]:
    match ours, theirs:
        case Factor(), Factor():
            yield ours, theirs
        case (Product(first), Product(second)) | (Sum(first), Sum(second)) | (Switch(first), Switch(second)) if len(
            first
        ) == len(second):
            for a, b in zip(first, second, strict=True):
                yield from _pair_factors(a, b, where)
        case _:
            raise ValueError(f"{where} is made of other parts in one of them than in the other")


@dataclass(frozen=True)
class _Recipe:
    """How the tensors of the narrow network are changed before they are padded.

    Attributes:
        matrices: for some bases the matrices that what makes their units, and what reads them, is multiplied by.
        factors: for some gains and offsets of norms what they are divided by.
        repeated: groups whose units are repeated; the new units of others are zero.
    """

    matrices: Mapping[str, tuple[Tensor, Tensor]]
    factors: Mapping[str, float]
    repeated: frozenset[str] = frozenset()


def _propose(symmetry: Symmetry, grown: Mapping[str, int], norms: _Norms) -> Iterator[_Recipe]:
    """Recipes to try, in this order."""
    bases = {name: basis for name, basis in symmetry.bases.items() if basis.group in grown}
    streams = {name: basis for name, basis in bases.items() if basis.kind in ("orthogonal", "centred")}
    queries = {}
    for name, basis in bases.items():
        if basis.kind == "linear" and _pairs_queries_with_keys(basis, symmetry):
            family = torch.eye(symmetry.sizes[basis.group], dtype=torch.float64).expand(matrix_shape(symmetry, basis))
            queries[name] = math.sqrt(grown[basis.group] / symmetry.sizes[basis.group]) * family, family
    zeros = _Recipe({}, {})
    copies = _Recipe({}, {}, frozenset(basis.group for basis in streams.values()))
    for name, basis in streams.items():
        size, wide = symmetry.sizes[basis.group], grown[basis.group]
        root = math.sqrt(wide / size)
        identity = torch.eye(size, dtype=torch.float64)
        made = identity - 1 / size if basis.kind == "centred" else identity
        gains = [key for key in symmetry.layouts if key in norms.gains and _has_group(symmetry, key, basis.group)]
        # A tensor that makes the stream and reads it too cannot be divided: the norm before it is, which is the last.
        is_tied = any(key in basis.places for keys in symmetry.ties for key in keys)
        last = [key for key in (*norms.gains, *norms.offsets) if gains and is_tied and _owner(key) == _owner(gains[-1])]
        read = identity if gains else identity / root
        factors = {key: root * (root if key in last else 1) for key in gains}
        zeros = _Recipe({**zeros.matrices, name: (root * made, read)}, {**zeros.factors, **factors})
        factors = dict.fromkeys(last, wide / size)
        matrices = {**copies.matrices, name: (identity, identity * size / wide)}
        copies = _Recipe(matrices, {**copies.factors, **factors}, copies.repeated)
    can_repeat = streams and all(grown[name] % symmetry.sizes[name] == 0 for name in copies.repeated)
    for recipe in (zeros, copies) if can_repeat else (zeros,):
        yield replace(recipe, matrices={**recipe.matrices, **queries})
        if queries:  # for attention whose scale does not depend on its size
            yield recipe


def _owner(key: str) -> str:
    return key.rpartition(".")[0]


def _has_group(symmetry: Symmetry, key: str, group: str) -> bool:
    return symmetry.layouts[key] == (Factor(symmetry.sizes[group], group),)


def _pairs_queries_with_keys(basis: Basis, symmetry: Symmetry) -> bool:
    """Whether layers make both sides of a basis: its matrix and the dual are on the same axis of their weights."""
    places = [place for key, at in basis.places.items() if len(symmetry.layouts[key]) == 2 for place in at]
    axes = [{place.axis for place in places if place.is_dual is is_dual} for is_dual in (False, True)]
    return axes[0] == axes[1]


def _correct(state: StateDict, symmetry: Symmetry, recipe: _Recipe, norms: _Norms) -> dict[str, Tensor]:
    bases, plans = {}, {}
    for name, (made, read) in recipe.matrices.items():
        basis = symmetry.bases[name]
        bases[name] = replace(basis, places={key: at for key, at in basis.places.items() if key not in norms.offsets})
        plans |= pair(name, made.to(state.device), read.to(state.device))
    divided = {key: state[key] / factor for key, factor in recipe.factors.items()}
    return {**state, **divided, **MixedTensors(bases, symmetry.layouts).mix_with({**state, **divided}, plans)}


def _pad(state: Mapping[str, Tensor], narrow: Symmetry, wide: Symmetry, recipe: _Recipe, norms: _Norms) -> dict[str, Tensor]:
    """Tensors in the shapes of the wide network. New entries are zero; in variances one, in gains as large as the others."""
    result = dict(state)
    for key, layout in narrow.layouts.items():
        if layout == wide.layouts[key]:
            continue
        value = state[key]
        fill = float(value.square().mean().sqrt()) if key in norms.gains else 1.0 if key.endswith("running_var") else 0.0
        for axis, terms in enumerate(zip(layout, wide.layouts[key], strict=True)):
            sources = _find_sources(*terms, recipe.repeated, key).to(value.device)
            is_new = (sources < 0).view(-1, *[1] * (value.dim() - axis - 1))
            value = value.index_select(axis, sources.clamp(min=0)).masked_fill(is_new, fill)
        result[key] = value
    return result


def _find_sources(ours: Term, theirs: Term, repeated: Collection[str], key: str) -> Tensor:
    """For each entry of an axis of the wide network the entry of the narrow one that it takes; -1 if it is new."""
    match ours, theirs:
        case Product(first), Product(second):
            found = torch.zeros(1, dtype=torch.int64)
            for a, b in zip(first, second, strict=True):
                inner, outer = _find_sources(a, b, repeated, key), found.unsqueeze(1)
                found = torch.where((outer < 0) | (inner < 0), -1, outer * a.size + inner).flatten()
            return found
        case Sum(first), Sum(second):
            start, parts = 0, []
            for a, b in zip(first, second, strict=True):
                inner = _find_sources(a, b, repeated, key)
                parts.append(torch.where(inner < 0, -1, start + inner))
                start += a.size
            return torch.cat(parts)
        case Switch(first), Switch(second):
            parts = [_find_sources(a, b, repeated, key) for a, b in zip(first, second, strict=True)]
            if not all(torch.equal(part, parts[0]) for part in parts):
                raise ValueError(f"the units that {key!r} reads are others in each of its segments, and grow differently")
            return parts[0]
        case Factor(size, name), _:
            entries = torch.arange(theirs.size)
            return entries % size if name in repeated else torch.where(entries < size, entries, -1)
    raise AssertionError("the terms have been paired")
