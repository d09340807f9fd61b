import pytest
import torch

from onebasin.checkpoints import open_models
from onebasin.landscape.evaluation import mean_loss
from tests.cli.cli_files import MLP
from tests.cli.cli_networks import batches

line_evaluation = pytest.importorskip("onebasin.cli.line_evaluation")


def test_lines_begin_at_the_first_checkpoint(folder):
    models = open_models([folder / "a.safetensors", folder / "b.pt"], MLP[1])
    loss, calls = torch.nn.functional.cross_entropy, []
    evaluator = line_evaluation.LineEvaluator(models, loss, batches(), num_points=3)
    paths = evaluator.evaluate_lines({"there": models.checkpoints[1]}, lambda *call: calls.append(call))
    ends = [mean_loss(loss, batches())(model)["loss"] for model in models.load()]
    assert paths["there"].losses[::2] == pytest.approx(ends)
    assert calls == [("points (there)", done, 3) for done in (1, 2, 3)]
    assert evaluator.evaluate_state(models.checkpoints[1])["loss"] == pytest.approx(ends[1])
    assert line_evaluation.list_numbers(paths)["there"]["metrics"]["loss"] == paths["there"].losses


def test_without_data_nothing_is_evaluated(folder):
    models = open_models([folder / "a.safetensors"], MLP[1])
    evaluator = line_evaluation.LineEvaluator(models, None, None)
    assert evaluator.evaluate_lines({"a": models.checkpoints[0]}, print) == {}
    assert evaluator.evaluate_state(models.checkpoints[0]) == {}
