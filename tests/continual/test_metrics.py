import pytest
import torch
from torch import nn

from onebasin.continual import AccuracyMatrix, Task, accuracy

MATRIX = AccuracyMatrix([[0.9, 0.1], [0.95, 0.8], [0.7, 0.6, 0.9]])


def test_numbers_worked_out_by_hand():
    assert MATRIX.average == pytest.approx((0.7 + 0.6 + 0.9) / 3)
    assert MATRIX.learning == pytest.approx((0.9 + 0.8 + 0.9) / 3)
    assert MATRIX.forgetting == pytest.approx(((0.95 - 0.7) + (0.8 - 0.6)) / 2)
    assert MATRIX.drop == pytest.approx(((0.9 - 0.7) + (0.8 - 0.6)) / 2)
    assert MATRIX.backward_transfer == pytest.approx(-0.2)
    assert MATRIX.num_tasks == 3


def test_a_single_task_cannot_be_forgotten():
    assert AccuracyMatrix([[0.5]]).forgetting == 0
    assert AccuracyMatrix([[0.5]]).drop == 0


def test_a_task_that_gets_better_has_negative_forgetting():
    assert AccuracyMatrix([[0.5], [0.6, 0.5]]).forgetting == pytest.approx(-0.1)


@pytest.mark.parametrize("rows", [[], [[]], [[0.1], [0.2]]])
def test_rows_must_reach_the_diagonal(rows):
    with pytest.raises(ValueError, match="row t"):
        AccuracyMatrix(rows)


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    ax = MATRIX.plot()
    lines = [list(line.get_ydata()) for line in ax.lines]
    assert lines[:3] == [[0.9, 0.95, 0.7], [0.8, 0.6], [0.9]]
    assert lines[3] == pytest.approx([0.9, 0.875, (0.7 + 0.6 + 0.9) / 3])
    ax.figure.canvas.draw()
    matplotlib.pyplot.close(ax.figure)


def test_accuracy_counts_right_answers_among_the_classes_of_the_task():
    model = nn.Linear(4, 4, bias=False)
    nn.init.eye_(model.weight)
    inputs = torch.tensor([[1.0, 2, 0, 0], [3, 2, 1, 0], [0, 0, 1, 0]])
    targets = torch.tensor([1, 1, 2])
    assert float(accuracy(model, Task(inputs, targets))) == pytest.approx(2 / 3)
    assert float(accuracy(model, Task(inputs, targets, (1, 2)), batch_size=2)) == 1
    assert model.training
