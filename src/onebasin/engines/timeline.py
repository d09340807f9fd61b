"""Where the time of all workers went, and when: a bounded number of intervals, however long a run takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onebasin.engines.clock import Span

NUM_INTERVALS = 128
_FIRST_WIDTH = 0.05
MAX_WORKERS = 64
"""Workers with a row of their own. Those that come later share one: on a cluster, workers that die get successors."""
_OTHERS = "other workers"


class Timeline:
    """Seconds of each worker in intervals of equal length, which doubles whenever a run becomes too long for it.

    Attributes:
        seconds: summed over workers, by what they were spent on.
        width: seconds of an interval.

    >>> timeline = Timeline()
    >>> timeline.add("worker 1", [Span("read", 0.0, 0.5), Span("score", 0.5, 2.0)])
    >>> timeline.seconds
    {'read': 0.5, 'score': 1.5}
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.width = _FIRST_WIDTH
        self._begin: float | None = None
        self._rows: dict[str, dict[str, list[float]]] = {}

    def add(self, worker: str, spans: Iterable[Span]) -> None:
        """Take spans of a worker; waiting is no work."""
        row = self._rows.get(worker)
        for span in (each for each in spans if each.what != "wait"):
            if row is None:
                name = worker if len(self._rows) < MAX_WORKERS else _OTHERS
                row = self._rows.setdefault(name, {})
            self._add(row.setdefault(span.what, [0.0] * NUM_INTERVALS), span)
            self.seconds[span.what] = self.seconds.get(span.what, 0.0) + span.end - span.start

    def _add(self, intervals: list[float], span: Span) -> None:
        self._begin = span.start if self._begin is None else self._begin
        # Clocks of other machines may go a little behind: nothing is before the beginning.
        start, end = (max(0.0, moment - self._begin) for moment in (span.start, span.end))
        while end > self.width * NUM_INTERVALS:
            self._double()
        first, last = (min(int(moment / self.width), NUM_INTERVALS - 1) for moment in (start, end))
        for place in range(first, last + 1):
            intervals[place] += max(0.0, min(end, (place + 1) * self.width) - max(start, place * self.width))

    def _double(self) -> None:
        self.width *= 2
        for row in self._rows.values():
            for intervals in row.values():
                intervals[:] = [
                    *(a + b for a, b in zip(intervals[::2], intervals[1::2], strict=True)),
                    *[0.0] * (NUM_INTERVALS // 2),
                ]

    @property
    def rows(self) -> Mapping[str, Mapping[str, list[float]]]:
        """For each worker the seconds in each interval, by what they were spent on; up to the last that is not empty."""
        used = [place for row in self._rows.values() for some in row.values() for place, each in enumerate(some) if each]
        length = 1 + max(used, default=-1)
        return {worker: {what: some[:length] for what, some in row.items()} for worker, row in self._rows.items()}
