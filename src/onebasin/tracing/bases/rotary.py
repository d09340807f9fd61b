"""Rotations of two units that a rotary embedding turns together, found by trial.

A rotary embedding turns pairs of units of queries and keys by angles that grow with the position. Turning a pair of the
queries by one more angle and multiplying it by a number, and turning the pair of the keys alike and dividing it, changes no
score. How an embedding is written differs from network to network, so it is not read: where queries meet keys, and the units
along which they meet cannot be permuted, both ways to pair units are tried on random parameters in float64, and one is kept
if the outputs stay the same. That says something only where queries meet several keys: with one key the softmax ignores its
score, and any pairing would do.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch.export.graph_signature import InputKind
from torch.fx import Node

from onebasin.programs.graph import Program
from onebasin.symmetries import Basis, Place, Symmetry
from onebasin.symmetries.layout import Factor, Product, Sum, Term, factors
from onebasin.symmetries.transform import TransformedSymmetry
from onebasin.symmetries.verification import MAX_ENTRIES, CannotVerify, Different, verify_programs
from onebasin.tensors.states import State
from onebasin.tracing.bases.basis_rules import RULES
from onebasin.tracing.trace import operation_name

Pairing = Literal["halves", "neighbours"]
"""Which units are turned together: those half the axis apart, or those beside each other."""

_UNIT_AXES = {"linear": 0, "addmm": -1, "matmul": -1, "mm": -1}
"""Along which axis of its weight an operation makes units."""
_MEETINGS = ("scaled_dot_product_attention", "matmul", "bmm")
_PASSED = RULES.keys() | {"view_as_complex", "view_as_real", "index", "getitem"}
"""Operations between the layers that make queries and keys and the place where these meet."""


def add_rotary_bases(symmetry: Symmetry, given: Sequence[Program], derived: Sequence[Program], state: State) -> Symmetry:
    """A symmetry with its rotary bases: for all attentions at once if they pair units alike, else for each by itself.

    Args:
        symmetry: without any.
        given: the calls that it was found from.
        derived: the same calls at other sizes and values. Of a large model they are tried only where the calls as given
            have a single key.
        state: of the model, for the shapes.
    """
    programs: Sequence[Program] = given
    num_keys = _count_keys(given)
    if state.num_entries <= MAX_ENTRIES or min(num_keys.values(), default=2) < 2:
        programs = (*given, *derived)
        num_keys = _count_keys(programs)
    possible = [meeting for meeting, n in num_keys.items() if n > 1 and _turn(symmetry, meeting, "halves") is not None]
    for pairing in ("halves", "neighbours"):
        found = _turn_all(symmetry, possible, pairing)
        if possible and _holds(found, programs, state):
            return found
    if len(possible) > 1:
        for meeting, pairing in itertools.product(possible, ("halves", "neighbours")):
            found = _turn_all(symmetry, [meeting], pairing)
            if found is not symmetry and _holds(found, programs, state):
                symmetry = found
    return symmetry


def _holds(symmetry: Symmetry, programs: Sequence[Program], state: State) -> bool:
    """Whether random elements of the rotary bases, and of nothing else, leave the outputs alone."""
    rotary = {name: basis for name, basis in symmetry.bases.items() if basis.is_rotary}
    try:
        verify_programs(TransformedSymmetry(replace(symmetry, groups={}, scales={}, bases=rotary)), programs, state)
    except (Different, CannotVerify):
        return False
    return True


@dataclass(frozen=True)
class _Meeting:
    """The parameters that make queries and keys, each with the axis of its units; and the number of units of a head."""

    queries: tuple[tuple[str, int], ...]
    keys: tuple[tuple[str, int], ...]
    size: int


def _count_keys(programs: Iterable[Program]) -> dict[_Meeting, int]:
    """Where queries meet keys, and the most keys that they meet there."""
    counts: dict[_Meeting, int] = {}
    for program in programs:
        for meeting, count in _find_meetings(program):
            counts[meeting] = max(counts.get(meeting, 0), count)
    return counts


def _find_meetings(program: Program) -> Iterator[tuple[_Meeting, int]]:
    """Where activations are multiplied with each other, as queries are with keys; and how many keys there are."""
    learned = _find_learned(program)
    for node in program.graph.nodes:
        if node.op != "call_function" or operation_name(node) not in _MEETINGS:
            continue
        first, second = node.args[:2]
        if not isinstance(first, Node) or not isinstance(second, Node):
            continue
        queries, keys = (_find_makers(operand, program, learned) for operand in (first, second))
        if queries and keys:
            along = -2 if operation_name(node) == "scaled_dot_product_attention" else -1
            yield _Meeting(queries, keys, first.meta["val"].shape[-1]), second.meta["val"].shape[along]


def _is_parameter(node: Node, program: Program) -> bool:
    return node.op == "placeholder" and program.inputs[node.name][0] is InputKind.PARAMETER


def _find_learned(program: Program) -> set[Node]:
    """The values that depend on parameters."""
    found: set[Node] = set()
    for node in program.graph.nodes:
        if _is_parameter(node, program) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _find_makers(node: Node, program: Program, learned: set[Node]) -> tuple[tuple[str, int], ...] | None:
    """The parameters of the layers that a value comes from; None if other operations than expected lie in between."""
    found: dict[tuple[str, int], None] = {}
    pending, seen = [node], {node}
    while pending:
        node = pending.pop()
        weights = {a: program.keys[a.name] for a in node.all_input_nodes if _is_parameter(a, program)}
        name = operation_name(node) if node.op == "call_function" else ""
        if name in _UNIT_AXES and weights:
            for argument, key in weights.items():
                num_axes = argument.meta["val"].dim()
                found[key, _UNIT_AXES[name] % num_axes if num_axes > 1 else 0] = None
        elif name not in _PASSED:
            return None
        else:
            fresh = [operand for operand in node.all_input_nodes if operand in learned and operand not in seen]
            seen.update(fresh)
            pending += fresh
    return tuple(found)


def _turn_all(symmetry: Symmetry, meetings: Sequence[_Meeting], pairing: Pairing) -> Symmetry:
    for meeting in meetings:
        symmetry = _turn(symmetry, meeting, pairing) or symmetry
    return symmetry


def _turn(symmetry: Symmetry, meeting: _Meeting, pairing: Pairing) -> Symmetry | None:
    """A symmetry with the basis of one meeting; None if its units can be permuted, or are not laid out as expected."""
    keys = {key for key, _ in (*meeting.queries, *meeting.keys)}
    if any(keys & set(tied) for tied in symmetry.ties):
        return None
    first = meeting.queries[0][0]
    base = next(
        name
        for name in _number(re.sub(r"[\s()+|\[\],]", "_", first))
        if name not in symmetry.bases and f"{name}:pair" not in symmetry.sizes
    )
    layouts = dict(symmetry.layouts)
    places: dict[str, list[Place]] = {}
    found: list[tuple[tuple[str, ...], int]] = []
    # Of packed queries, keys and values the first part that cannot be permuted is taken to be queries, the second keys.
    for is_dual, makers in ((False, meeting.queries), (True, meeting.keys)):
        for key, axis in makers:
            number = len(places.get(key, ()))
            try:
                term, parents, size = _split(layouts[key][axis], (), base, meeting.size, pairing)
            except LookupError:
                return None
            layouts[key] = (*layouts[key][:axis], term, *layouts[key][axis + 1 :])
            places.setdefault(key, []).append(Place(axis, number, is_dual))
            found.append((parents, size))
    parents = found[-1][0]  # several heads of queries may share one of keys
    if any(not set(parents) <= set(above) for above, _ in found) or len({size for _, size in found}) > 1:
        return None
    fixed = (
        (f"{base}:head",) if any(f.name == f"{base}:head" for f in factors(layouts[first][meeting.queries[0][1]])) else ()
    )
    basis = Basis(
        base, f"{base}:pair", "rotary", {key: tuple(p) for key, p in places.items()}, (*parents, *fixed, f"{base}:angle")
    )
    scales = {name: scale for name, scale in symmetry.scales.items() if not scale.powers.keys() <= keys}
    modules = {key.rpartition(".")[0] for key in keys}  # activations that may be turned cannot be compared unit by unit
    sites = {name: tuple(s for s in found if s.module not in modules) for name, found in symmetry.sites.items()}
    return replace(
        symmetry,
        layouts=layouts,
        bases={**symmetry.bases, base: basis},
        scales=scales,
        sites=sites,
    )


def _number(name: str) -> Iterator[str]:
    return itertools.chain([name], (f"{name}:{number}" for number in itertools.count(2)))


def _split(term: Term, above: tuple[str, ...], base: str, size: int, pairing: Pairing) -> tuple[Term, tuple[str, ...], int]:
    """A term whose first part that cannot be permuted is cut into pairs.

    Args:
        term: of an axis.
        above: the names of the factors that it stands beside.
        base: the start of the names of the new factors.
        size: of a head.
        pairing: how units are paired.

    Returns:
        The term, the names that the pairs stand beside, and the number of units that are paired.

    Raises:
        LookupError: if there is no such part.
    """
    match term:
        case Factor(whole, None) if whole % 2 == 0 and (whole % size == 0 or whole < size):
            num_heads, num_units = (whole // size, size) if whole % size == 0 else (1, whole)
            pair, angles = Factor(2, f"{base}:pair"), Factor(num_units // 2, f"{base}:angle")
            inner = (pair, angles) if pairing == "halves" else (angles, pair)
            return Product(((Factor(num_heads, f"{base}:head"),) if num_heads > 1 else ()) + inner), above, whole
        case Product(children):
            names = tuple(child.name for child in children if isinstance(child, Factor) and child.name)
            found, number = _split_one(children, (*above, *names), base, size, pairing)
            new = found[0].factors if isinstance(found[0], Product) else (found[0],)
            return Product((*children[:number], *new, *children[number + 1 :])), *found[1:]
        case Sum(children):
            found, number = _split_one(children, above, base, size, pairing)
            return Sum((*children[:number], found[0], *children[number + 1 :])), *found[1:]
    raise LookupError


def _split_one(
    children: Sequence[Term], above: tuple[str, ...], base: str, size: int, pairing: Pairing
) -> tuple[tuple[Term, tuple[str, ...], int], int]:
    for number, child in enumerate(children):
        try:
            return _split(child, above, base, size, pairing), number
        except LookupError:
            continue
    raise LookupError
