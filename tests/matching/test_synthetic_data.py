"""Inputs made from networks alone."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.cli.digits_demo import train
from onebasin.datasets import digits


def make_classifier(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(16 * width, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> list[nn.Module]:
    images, labels = digits("train")
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(train(make_classifier(), images, labels, seed, epochs=8))
    return found


def read_statistics(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    """The mean and variance of what each norm sees."""
    probe, seen = copy.deepcopy(model), []
    for norm in probe:
        if isinstance(norm, nn.BatchNorm2d):
            norm.register_forward_pre_hook(lambda _, args: seen.append((args[0].mean((0, 2, 3)), args[0].var((0, 2, 3)))))
    probe(inputs)
    return seen


def test_inputs_have_the_statistics_and_the_labels_of_both_models(trained):
    before = [copy.deepcopy(model.state_dict()) for model in trained]
    data = ob.synthetic_data(trained, (1, 8, 8), num_batches=2, batch_size=100, steps=150)
    assert [tuple(x.shape) for x, _ in data] == [(100, 1, 8, 8)] * 2
    assert not torch.equal(data[0][0], data[1][0])
    for model, state in zip(trained, before, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert all(not module._forward_pre_hooks for module in model.modules())
        assert all(parameter.requires_grad for parameter in model.parameters())
        for x, y in data:
            assert y.bincount(minlength=10).tolist() == [10] * 10
            with torch.no_grad():
                assert (model(x).argmax(1) == y).float().mean() > 0.95
                norms = [module for module in model if isinstance(module, nn.BatchNorm2d)]
                for norm, (mean, variance) in zip(norms, read_statistics(model, x), strict=True):
                    assert float(((mean - norm.running_mean) / norm.running_var.sqrt()).abs().mean()) < 0.2
                    assert float((variance / norm.running_var).log().abs().mean()) < 0.3


def test_networks_merge_better_with_it_than_by_their_weights(trained):
    a, b = trained
    test_images, test_labels = digits("test")
    data = ob.synthetic_data(trained, (1, 8, 8), num_batches=4, batch_size=250, steps=150)

    def accuracy(**options) -> float:
        merged = ob.merge([a, b], test_images[:2], **options)
        merged.load_state_dict(ob.reset_batch_norm(merged, data))
        return float((merged.eval()(test_images).argmax(1) == test_labels).float().mean())

    by_weights = accuracy(method="weight-matching")
    by_data = accuracy(
        objective=ob.RandomPoint(nn.functional.cross_entropy, low=0.3, high=0.7),
        data=data,
        kinds="positive",
        scaling=ob.Scaling(steps=100),
    )
    assert by_data > by_weights + 0.02, (by_weights, by_data)


def test_one_seed_makes_one_result_and_leaves_the_generator_alone(trained):
    state = torch.random.get_rng_state()
    found = [ob.synthetic_data(trained, (1, 8, 8), 1, 20, 3, seed=seed)[0][0] for seed in (0, 0, 1)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("make_models", "message"),
    [
        (list, "at least one model"),
        (lambda: [nn.Sequential(nn.Flatten(), nn.Linear(64, 10))], "model 1 has no batch norm"),
        (lambda: [make_classifier()[:4]], "one row of scores"),
        (lambda: [make_classifier(), nn.Sequential(make_classifier(), nn.Linear(10, 3))], "classes: 10, 3"),
    ],
)
def test_models_that_cannot_be_inverted_are_refused(make_models, message):
    with pytest.raises(ValueError, match=message):
        ob.synthetic_data(make_models(), (1, 8, 8))


def test_inputs_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"inputs of shape \(3, 8, 8\)"):
        ob.synthetic_data([make_classifier()], (3, 8, 8))


@pytest.mark.parametrize("option", [{"steps": 0}, {"lr": 0}, {"num_batches": 1.5}, {"smoothness": -1}])
def test_numbers_out_of_range_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        ob.synthetic_data([make_classifier()], (1, 8, 8), **option)
