"""The loss on the lines between checkpoints, for `barrier` and for the reports of `align` and `merge`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from onebasin.checkpoints import CheckpointSet
from onebasin.landscape.batches import copy_model
from onebasin.landscape.calibration import RepairForm
from onebasin.landscape.evaluation import mean_loss
from onebasin.landscape.paths import LinearPath, linear_path
from onebasin.tensors.progress import Progress
from onebasin.tensors.states import State

NUM_POINTS = 11
"""On each line of a report."""


class LineEvaluator:
    """Evaluates models on straight lines that begin at the first checkpoint.

    Args:
        models: the checkpoints.
        loss: of an output and a target.
        data: batches (inputs, target). If None, nothing is evaluated and all results are empty.
        num_points: on each line, both ends included.
        reset: estimate the statistics of batch norms again at every point.
        repair: put the statistics of hidden units right between the ends, in this form.
        device: where to run them.
    """

    def __init__(
        self,
        models: CheckpointSet,
        loss: Any,
        data: Any,
        num_points: int = NUM_POINTS,
        reset: bool = False,
        repair: RepairForm | None = None,
        device: str = "cpu",
    ):
        self.options: dict[str, Any] = {
            "num_points": num_points,
            "data": data if reset or repair is not None else None,
            "repair": repair,
            "symmetry": models.symmetry,
        }
        self.evaluate = None if data is None else mean_loss(loss, data)
        self.first = None if data is None else models.load_model(models.checkpoints[0]).to(device)

    def repair(self, form: RepairForm | None, data: Any) -> None:
        """Put the statistics of hidden units right between the ends from now on, in this form, from these batches."""
        self.options |= {"repair": form, "data": data if form is not None else None}

    def evaluate_lines(
        self, states: Mapping[str, State], progress: Progress, first: nn.Module | None = None
    ) -> dict[str, LinearPath]:
        """The line to each state, by its name; from another model than the first checkpoint, if one is given."""
        if self.first is None or self.evaluate is None:
            return {}
        paths: dict[str, LinearPath] = {}
        for name, state in states.items():
            report = functools.partial(_report, progress, name)
            held = state.load()  # once, not at every point
            paths[name] = linear_path(first or self.first, held, self.evaluate, progress=report, **self.options)
        return paths

    def evaluate_state(self, state: State, like: nn.Module | None = None) -> dict[str, float]:
        """The loss, and other metrics, of one state; of another module than that of the checkpoints, if one is given."""
        if self.first is None or self.evaluate is None:
            return {}
        model = copy_model(self.first if like is None else like)
        model.load_state_dict(state.load())
        return self.evaluate(model)


def _report(progress: Progress, line: str, what: str, done: int, total: int) -> None:
    progress(f"{what} ({line})", done, total)


def list_numbers(paths: Mapping[str, LinearPath]) -> dict[str, Any]:
    """The numbers of paths, for JSON."""
    return {
        name: {"barrier": path.barrier, "auc": path.auc, "weights": path.weights, "metrics": path.metrics}
        for name, path in paths.items()
    }
