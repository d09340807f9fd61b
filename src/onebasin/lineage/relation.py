"""Does one network come from the other?"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from onebasin.engines import Engine, EngineName, opened
from onebasin.engines.memory_limits import MemoryEstimate
from onebasin.engines.work_meter import CHECKING
from onebasin.landscape.batches import check_data, find_example
from onebasin.lineage.comparison import TESTS, Comparison
from onebasin.lineage.kinship import Evidence
from onebasin.lineage.layer_stacks import Stack, find_stack
from onebasin.matching.canonical_form import canonicalise
from onebasin.matching.checks import find_symmetry
from onebasin.matching.methods.base import check_choice, check_count
from onebasin.matching.problem import Problem, estimate_need, make_problem
from onebasin.relaxation.objectives import WeightDistance
from onebasin.symmetries import Symmetry, Transform
from onebasin.symmetries.transform import check_fixed
from onebasin.tensors.comparison import check_alike, check_finite
from onebasin.tensors.progress import Progress, show_progress
from onebasin.tensors.states import Model, read_state
from onebasin.tracing import Kinds

Relation = Literal["same", "derived", "independent", "unknown"]
_DOUBTFUL = 1e-3
"""Above this p-value networks are called independent."""
_HELD_ENTRIES = 10**8
"""Of the tensors that are held while a set of groups is decided, at most."""
_NUM_ROWS = 4.5
"""Copies of a tensor that the tests of a group hold, as measured."""


@dataclass(frozen=True)
class Provenance:
    """What `provenance` found.

    Attributes:
        relation: "same": the same function up to symmetry; "derived": one comes from the other, or both from a third, or
            from the same start; "independent": nothing says so, in tests that would have shown it; "unknown": cannot tell.
        p_value: of both tests together. Each p-value is one of Fisher's combination over groups, and the smaller of the two
            is doubled.
        p_values: of each test.
        evidence: of each test on each group: `test`, `group`, `num_units`, `num_agreeing`, `p_value`, `keys`, and `other`,
            the tensors of the network with more blocks.
        level: the p-value from which on the networks count as derived.
        changes: for each parameter the norm of the difference to A's, relative to the norm of A's, after alignment; empty
            for networks that are neither the same nor derived, and for files whose units were reordered.
        transform: what makes B's parameters equal or closest to A's, if it was looked for; None if B is compared as it is.
        notes: what was done, and what limits the answer, in sentences.
        seconds: how long it took.

    >>> import copy, torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> one = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> tuned = copy.deepcopy(one)
    >>> _ = tuned[0].weight.data.add_(0.01 * torch.randn(32, 16))
    >>> found = ob.provenance(one, tuned, torch.zeros(1, 16))
    >>> found.relation, found.p_value < 1e-6
    ('derived', True)
    """

    relation: Relation
    p_value: float
    p_values: Mapping[str, float]
    evidence: tuple[Evidence, ...]
    level: float
    changes: Mapping[str, float] = field(default_factory=dict)
    transform: Transform | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def change(self) -> float | None:
        """The largest relative change of a parameter; None if it was not measured."""
        return max(self.changes.values(), default=None)

    @property
    def layers(self) -> dict[str, float]:
        """For each group that counts as derived by itself its p-value, times the number of tests on single groups."""
        found: dict[str, float] = {}
        for each in self.evidence:
            corrected = min(1.0, len(self.evidence) * each.p_value)
            if corrected <= self.level:
                found[each.group] = min(corrected, found.get(each.group, 1.0))
        return found

    @property
    def answer(self) -> str:
        """One sentence."""
        if self.relation == "same":
            moved = "as they are" if self.transform is None else f"after {self.transform!r}"
            exact = f"differ by at most {self.change or 0.0:.1e} of their size"
            return f"The same function up to symmetry: parameters {moved} {exact}."
        if self.relation == "derived":
            groups = len({each.group for each in self.evidence})
            text = f"Derived: p = {_write(self.p_value)}; {len(self.layers)} of {groups} groups of units by themselves"
            if self.changes:
                spread = sorted(self.changes.values())
                text += f"; parameters were changed by {spread[0]:.1e} to {spread[-1]:.1e} of their size"
            return f"{text}."
        if self.relation == "independent":
            return f"Independent, as far as can be told: p = {_write(self.p_value)}."
        return f"Cannot tell: p = {_write(self.p_value)}."

    def __str__(self) -> str:
        lines = [self.answer]
        rows = [("test", "group", "units", "agree", "p")]
        for each in self.evidence:
            rows.append((each.test, each.group, str(each.num_units), str(each.num_agreeing), _write(each.p_value)))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        if self.evidence:
            lines += ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self.notes])


def provenance(
    a: Model,
    b: Model,
    example_inputs: Any = None,
    symmetry: Symmetry | None = None,
    data: Any = None,
    kinds: Kinds | None = None,
    level: float = 1e-6,
    tolerance: float = 0.05,
    seed: int = 0,
    progress: bool | Progress = False,
    engine: Engine | EngineName | None = None,
) -> Provenance:
    """Does one network come from the other, or do both come from the same start?

    First B is compared with A up to symmetry: copies are found exactly. Then two tests look at every group of units.
    *Order*: units stand in the same places. It is exact if B was trained from a random start of its own by a recipe that
    treats units alike, and finds fine-tunes whose units were not reordered. *Residual*: the parts of the weights in which
    mostly the random start is left agree with the parts that carry what was learned about which units belong together. It
    finds networks that were reordered, rescaled or rotated as well. That two networks learn the same features from the same
    data is no evidence in either test, as long as these features do not reach into the residual parts of more than
    `tolerance` of the units.

    Args:
        a: a module, a state dict, or a lazy state such as a checkpoint, which is read tensor by tensor.
        b: another one of the same architecture, or with more or fewer blocks: then all pairs of blocks are compared.
        example_inputs: to trace the symmetry with; not needed if `symmetry` or `data` is given.
        symmetry: from `onebasin.symmetry` or `Symmetry.from_axes`.
        data: batches, whose first is taken to trace with if there are no `example_inputs`.
        kinds: which symmetry B may have been transformed by: "permutation", "positive" or "all"; see `onebasin.symmetry`.
            If None, "all" for modules, which are compared in canonical form, and "permutation" for states.
        level: the p-value from which on they count as derived.
        tolerance: of the residual test.
        seed: of random choices: which units of large groups are compared, and how ties are broken.
        progress: show a progress line; or a function to call with what is done, how far, and how much there is.
        engine: where lazy states are checked, compared for an exact copy, scored and measured, see `onebasin.align`. The
            tests of groups run one after another in this process.

    Raises:
        ValueError: before any work is done, if the networks do not fit, hold NaN, or something is missing or out of range.

    >>> import copy
    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> one = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> other = copy.deepcopy(one)
    >>> x = torch.zeros(1, 16)
    >>> _ = other.load_state_dict(ob.symmetry(one, x).random().apply(one))
    >>> ob.provenance(one, other, x).relation
    'same'
    """
    if not isinstance(engine, Engine):
        with opened(engine) as running:
            return provenance(a, b, example_inputs, symmetry, data, kinds, level, tolerance, seed, progress, running)
    begin = time.perf_counter()
    _check_numbers(level, tolerance, seed)
    batches = None if data is None else check_data(data, needs_target=False)
    example = find_example(example_inputs, batches)
    stack = _check_states(a, b, engine)
    swapped = stack is not None and len(read_state(a).shapes) > len(read_state(b).shapes)
    first, other = (b, a) if swapped else (a, b)
    are_modules = isinstance(first, nn.Module) and isinstance(other, nn.Module)
    if kinds is None:
        is_whole = are_modules and example is not None if symmetry is None else bool(symmetry.bases)
        kinds = "all" if is_whole else "permutation"
    check_choice("kinds", kinds, "permutation", "positive", "all")
    notes = [] if stack is None else [_describe_stack(stack)]
    finished: list[Comparison] = []
    with show_progress(progress) as show, engine.meter.reporting(show):
        for shift in range(1 if stack is None else len(stack.many)):
            seen = other if stack is None else _fit_blocks(first, other, stack, shift)
            setting = _prepare(first, seen, example, symmetry, kinds)
            comparison = Comparison(
                replace(setting.problem, seed=seed, progress=show, engine=engine), tolerance, stack, shift
            )
            notes += [note for note in setting.notes if note not in notes]
            if shift == 0 and comparison.problem.source.is_lazy:
                engine.check_memory(_estimate_need(comparison.problem))
                _check_values(a, b, engine)
            comparison.run(look_for_copy=stack is None)
            finished.append(comparison)
    result = _conclude(finished, level, notes, kinds)
    return replace(result, seconds=time.perf_counter() - begin)


def _check_numbers(level: float, tolerance: float, seed: int) -> None:
    if not 0 < level < _DOUBTFUL:
        raise ValueError(f"level must be between 0 and {_DOUBTFUL:g}, got {level}")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be a share, at least 0 and less than 1, got {tolerance}")
    check_count("seed", seed)


def _check_states(a: Model, b: Model, engine: Engine) -> Stack | None:
    """Refuse networks that cannot be compared; the blocks in which they differ, if it is only their number."""
    states = {"A": read_state(a), "B": read_state(b)}
    one, other = states.values()
    stack = None
    if one.shapes.keys() != other.shapes.keys():
        stack = find_stack(one, other)
    if stack is None:
        check_alike(one, other, "A", "B")
    engine.check_states(states)
    if not (one.is_lazy or other.is_lazy):  # those are looked at when it is known that there is memory enough
        _check_values(a, b, engine)
    return stack


def _check_values(a: Model, b: Model, engine: Engine) -> None:
    """Refuse networks that hold NaN or infinity."""
    states = {"A": read_state(a), "B": read_state(b)}
    engine.meter.expect(CHECKING, sum(state.num_bytes for state in states.values()))
    with engine.broadcast(*states.values()):
        check_finite(states, functools.partial(engine.map, stage=CHECKING))


def _estimate_need(problem: Problem) -> MemoryEstimate:
    """What a comparison of lazy states holds: the tests of groups in this process, scores and sums in workers."""
    matching, shapes = estimate_need(problem), problem.target.shapes
    held = min(_HELD_ENTRIES, sum(shapes[key].numel() for key in problem.keys)) * problem.dtype.itemsize
    # Rows of a pair of tensors and their copies; or tensors of a set of groups before and after a step, and the target's.
    testing = max(_NUM_ROWS * max(shapes[key].nbytes for key in problem.keys), 3 * held)
    return replace(matching, driver=int(matching.driver + testing))


def _describe_stack(stack: Stack) -> str:
    few, many = len(stack.few), len(stack.many)
    return (
        f"One network has {few} blocks {stack.prefix}*, the other {many}: all {few * many} pairs of blocks were compared, "
        f"and p-values multiplied by {many}."
    )


def _fit_blocks(few: Model, many: Model, stack: Stack, shift: int) -> Any:
    """The network with more blocks in the architecture of the other one."""
    view = stack.view(read_state(few), read_state(many), shift)
    if not isinstance(few, nn.Module):
        return view
    result = copy.deepcopy(few)
    result.load_state_dict(view.load(), strict=False)
    return result


@dataclass(frozen=True)
class _Setting:
    problem: Problem
    notes: Sequence[str]


def _prepare(a: Model, b: Model, example: Any, symmetry: Symmetry | None, kinds: Kinds) -> _Setting:
    notes: list[str] = []
    if kinds == "all" and symmetry is None:
        (a, b), symmetry, done = canonicalise([a, b], example, None)
        notes = list(done)
    symmetry = find_symmetry([a, b], example, symmetry, None, kinds)
    for each in (a, b) if symmetry.bases else ():
        check_fixed(symmetry, read_state(each))
    return _Setting(make_problem(b, a, symmetry, WeightDistance(), None, lazily=True), notes)


def _conclude(finished: Sequence[Comparison], level: float, notes: list[str], kinds: Kinds) -> Provenance:
    p_values = {test: min(1.0, len(finished) * min(each.p_values()[test] for each in finished)) for test in TESTS}
    p_value = min(1.0, len(TESTS) * min(p_values.values()))
    best = max(finished, key=lambda each: -min(each.p_values().values()))
    evidence = _keep_best([each.evidence for each in finished])
    relation: Relation = "derived" if p_value <= level else "independent"
    if best.is_copy:
        relation = "same"
    elif relation == "derived":
        best.measure_derived(in_place=p_values["order"] <= level)
        relation = "same" if best.is_copy and len(finished) == 1 else "derived"
    else:
        best.changes, best.transform = {}, None
        reachable = min(1.0, len(finished) * len(TESTS) * min(each.smallest_p_value() for each in finished))
        if p_value <= _DOUBTFUL:
            relation = "unknown"
            notes = [*notes, f"There is some evidence that they are related, but not as much as {level:g}."]
        elif reachable > level:
            relation = "unknown"
            why = "no group of units can be tested so that it is found if units were reordered"
            if any(each.test == "residual" for each in evidence):
                why = f"there are so few units that p = {_write(reachable)} is the smallest possible"
            notes = [*notes, f"Units do not stand in the same places; {why}."]
        elif kinds != "all":
            hint = "it is found with kinds='all', or --symmetry all on the command line"
            notes = [*notes, f"A network that was rotated or rescaled may look independent here: {hint}."]
    if len(finished) > 1:
        best.changes, best.transform = {}, None
    return Provenance(relation, p_value, p_values, tuple(evidence), level, best.changes, best.transform, tuple(notes))


def _keep_best(found: Sequence[Sequence[Evidence]]) -> list[Evidence]:
    """Of each group and test the most telling one; p-values are multiplied by how many there were."""
    kept: dict[tuple[str, str], Evidence] = {}
    for each in (evidence for some in found for evidence in some):
        place = (each.test, each.group)
        if place not in kept or each.p_value < kept[place].p_value:
            kept[place] = each
    return [replace(each, p_value=min(1.0, len(found) * each.p_value)) for each in kept.values()]


def _write(p_value: float) -> str:
    return f"{p_value:.2g}" if p_value > 1e-299 else "1e-300 or less"
