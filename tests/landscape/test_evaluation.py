import pytest
import torch
from torch import nn

from onebasin.landscape.evaluation import LOSSES, mean_loss


def test_batches_weigh_by_their_size():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4), torch.randn(10, 3), torch.randint(4, (10,))
    found = mean_loss(LOSSES["cross-entropy"], [(x[:7], y[:7]), (x[7:], y[7:])])(model)
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(model(x), y).detach()), rel=1e-6)
    assert found["accuracy"] == pytest.approx(float((model(x).argmax(1) == y).float().mean()))


def test_accuracy_is_for_classes_only():
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    assert mean_loss(LOSSES["mse"], [(x, torch.zeros(5, 1))])(model).keys() == {"loss"}


def test_inputs_may_be_arguments_or_keywords():
    model, x, y = nn.Bilinear(2, 2, 3), torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
    losses = [mean_loss(LOSSES["cross-entropy"], [(inputs, y)])(model) for inputs in ((x, x), {"input1": x, "input2": x})]
    assert losses[0] == losses[1]


def test_data_that_cannot_be_used():
    with pytest.raises(ValueError, match="the data has no batches"):
        mean_loss(LOSSES["mse"], [])(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="can be read once"):
        mean_loss(LOSSES["mse"], iter([]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_moved_to_the_model():
    model, x, y = nn.Linear(3, 4), torch.randn(10, 3), torch.randint(4, (10,))
    evaluate = mean_loss(LOSSES["cross-entropy"], [(x, y)])
    assert evaluate(model.cuda())["loss"] == pytest.approx(evaluate(model.cpu())["loss"], rel=1e-4)
