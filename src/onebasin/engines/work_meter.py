"""How far the work of a run has come, over all its stages, in one number.

Work is counted in bytes: those that are read or written, and for arithmetic those that a core would read in the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from onebasin.tensors.progress import Progress

CHECKING, HASHING, MEASURING, COPIES, MATCHING, WRITING = (
    "checking", "hashing", "measuring", "looking for a copy", "matching", "writing",
)  # fmt: skip
"""The stages of a run, as progress calls them."""
UNIT = ", MB"
"""What the names of stages end in where a meter reports them: the numbers behind it go on from stage to stage."""
FLOPS_PER_BYTE = 50
"""Floating-point operations in the time in which a core reads a byte: 50 GFLOP/s beside 1 GB/s."""


class WorkMeter:
    """Counts what is done beside what is expected. Where more turns out to be needed, the whole grows.

    Attributes:
        report: called with the stage, and with the megabytes that are done and those that there are, in all stages; None if
            nobody wants to know.

    >>> meter = WorkMeter()
    >>> meter.report = lambda *told: print(told)
    >>> meter.expect("reading", 3e6)
    >>> meter.advance("reading", 1e6)
    ('reading, MB', 1, 3)
    >>> meter.finish("reading")
    ('reading, MB', 1, 1)
    """

    def __init__(self) -> None:
        self.report: Progress | None = None
        self._expected: dict[str, float] = {}
        self._done: dict[str, float] = {}

    def expect(self, stage: str, amount: float) -> None:
        """There is more to do in a stage."""
        self._expected[stage] = self._expected.get(stage, 0.0) + amount

    def expect_left(self, stage: str, amount: float) -> None:
        """So much is left to do in a stage, whatever was expected."""
        self._expected[stage] = self._done.get(stage, 0.0) + amount

    def advance(self, stage: str, amount: float) -> None:
        """So much of a stage was done."""
        self._done[stage] = self._done.get(stage, 0.0) + amount
        self._tell(stage)

    def finish(self, stage: str) -> None:
        """Nothing is left to do in a stage."""
        self.expect_left(stage, 0.0)
        self._tell(stage)

    def _tell(self, stage: str) -> None:
        if self.report is None:
            return
        done = sum(self._done.values())
        total = sum(max(self._expected.get(each, 0.0), self._done.get(each, 0.0)) for each in {*self._expected, *self._done})
        self.report(f"{stage}{UNIT}", int(done / 1e6), max(int(total / 1e6), 1))

    @contextlib.contextmanager
    def reporting(self, report: Progress) -> Iterator[None]:
        """Report to a function inside, unless somebody wants to know already."""
        if self.report is not None:
            yield
            return
        self.report = report
        try:
            yield
        finally:
            self.report = None
