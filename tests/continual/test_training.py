"""Losses of task and memory are weighed, and optimisers are made for each task."""

import pytest
import torch
from torch import nn

from onebasin.continual.training import Losses, adam, check_weighting, sgd


@pytest.mark.parametrize(("weighting", "expected"), [("pooled", 0.25 * 2 + 0.75 * 6), ("equal", 4.0)])
def test_task_and_memory_are_weighed(weighting, expected):
    losses = Losses(torch.tensor(2.0), torch.tensor(6.0), None, task_share=0.25)
    assert float(losses.weigh(weighting)) == pytest.approx(expected)


def test_without_a_memory_the_task_is_all():
    task = torch.tensor(2.0)
    assert Losses(task, None, None, task_share=1.0).weigh("equal") is task


def test_other_weightings_are_refused():
    check_weighting("pooled")
    with pytest.raises(ValueError, match="weighting must be 'pooled' or 'equal', got 'sum'"):
        check_weighting("sum")


@pytest.mark.parametrize(("make", "kind"), [(sgd, torch.optim.SGD), (adam, torch.optim.Adam)])
def test_optimizers_have_their_options_and_nothing_in_common(make, kind):
    parameters = list(nn.Linear(2, 3).parameters())
    make_optimizer = make(0.3, weight_decay=0.5)
    first, second = make_optimizer(parameters), make_optimizer(parameters)
    assert type(first) is kind
    assert first is not second
    (group,) = first.param_groups
    assert (group["lr"], group["weight_decay"], group["params"]) == (0.3, 0.5, parameters)
