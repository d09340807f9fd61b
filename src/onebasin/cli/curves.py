"""The loss on the lines between checkpoints, for `barrier` and for the reports of `align` and `merge`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onebasin.cli import tasks
from onebasin.cli.console import Track

if TYPE_CHECKING:
    from onebasin.checkpoints import Opened
    from onebasin.landscape.paths import LinearPath as Curve

_REPORTED_POINTS = 11


class Lines:
    """Measures lines from the first checkpoint.

    Args:
        opened: the checkpoints.
        loss: of an output and a target.
        data: batches (inputs, target) that can be read again and again.
        points: on each line, both ends included.
        reset: estimate the statistics of batch norms anew at every point.
    """

    def __init__(self, opened: Opened, loss: Any, data: Any, points: int, reset: bool = False):
        from onebasin.landscape.evaluation import mean_loss

        self.model = opened.load_one(0)
        self.evaluate = mean_loss(loss, data)
        self.points = points
        self.data = data if reset else None

    def measure(self, states: Mapping[str, Any], track: Track) -> dict[str, Curve]:
        """The line to each state, by its name."""
        from onebasin.landscape.paths import linear_path

        done = 0

        def counted(candidate: Any) -> Any:
            nonlocal done
            done += 1
            result = self.evaluate(candidate)
            track("points", done, self.points * len(states))
            return result

        return {
            name: linear_path(self.model, self._as_run(state), counted, self.points, data=self.data)
            for name, state in states.items()
        }

    def evaluate_state(self, state: Any) -> dict[str, float]:
        """The loss, and what else is measured, of one state."""
        from onebasin.landscape.batches import copy_model

        model = copy_model(self.model)
        model.load_state_dict(self._as_run(state))
        return self.evaluate(model)

    def _as_run(self, state: Any) -> dict[str, Any]:
        own = self.model.state_dict()
        return {key: value.to(own[key].dtype) for key, value in state.items()}


def lines_for_report(report: Any, opened: Opened, data: str | None, loss: str) -> Lines | None:
    """Where a report was asked for and there is data to measure on."""
    if report is None or data is None:
        return None
    return Lines(opened, tasks.read_loss(loss), tasks.read_data(data, "test"), _REPORTED_POINTS)


def record(curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Curves for machines."""
    return {
        name: {"barrier": curve.barrier, "auc": curve.auc, "weights": curve.weights, "metrics": curve.metrics}
        for name, curve in curves.items()
    }
