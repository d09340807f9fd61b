"""Images that are drawn."""

import pytest
import torch
from torch import nn

import onebasin as ob


def make_classifier(num_classes: int = 5) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, num_classes))


def test_images_are_labelled_by_all_models():
    models = [make_classifier(), make_classifier()]
    for images, chances in ob.synthetic_images(models, (3, 16, 16), num_batches=2, batch_size=6):
        assert images.shape == (6, 3, 16, 16)
        with torch.no_grad():
            expected = sum(model(images).softmax(1) for model in models) / 2
        torch.testing.assert_close(chances, expected)


def test_images_look_like_leaves():
    """Zero mean, unit deviation; neighbours are alike, but there are edges; images differ."""
    ((images, _),) = ob.synthetic_images([make_classifier()], (3, 16, 16), num_batches=1, batch_size=64)
    torch.testing.assert_close(images.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std(), torch.tensor(1.0))
    steps = images.diff(dim=3)
    kurtosis = steps.pow(4).mean() / steps.square().mean().square()
    assert steps.square().mean() < 0.5  # 2 where neighbours have nothing in common
    assert kurtosis > 6  # 3 without edges
    assert images.mean((1, 2, 3)).std() > 0.2


def test_the_seed_decides():
    first, again, other = (ob.synthetic_images([make_classifier()], (3, 16, 16), 1, 4, seed=s)[0][0] for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_models_are_left_as_they_are():
    model = make_classifier().train()
    ob.synthetic_images([model], (3, 16, 16), num_batches=1, batch_size=2)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_permuted_network_is_found_on_drawn_images():
    model = make_classifier()
    symmetry = ob.symmetry(model, torch.zeros(2, 3, 16, 16))
    planted = symmetry.random(torch.Generator().manual_seed(0))
    moved = make_classifier()
    moved.load_state_dict(planted.apply(model.state_dict()))
    data = ob.synthetic_images([model, moved], (3, 16, 16), num_batches=1, batch_size=64)
    found = ob.align(moved, to=model, symmetry=symmetry, method="activation-matching", data=data)
    for key, value in found.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[key])


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ([], {}, "at least one model"),
        ([make_classifier(5), make_classifier(4)], {}, "different numbers of classes: 5, 4"),
        ([make_classifier()], {"shape": (16, 16)}, "channels, height, width"),
        ([make_classifier()], {"shape": 16}, "channels, height, width"),
        ([make_classifier()], {"shape": "abc"}, "channels, height, width"),
        ([make_classifier()], {"shape": (3, 0, 16)}, "channels, height, width"),
        ([make_classifier()], {"shape": (1, 16, 16)}, "cannot be called with inputs of shape"),
        ([nn.Conv2d(3, 2, 3)], {}, "one row of scores per input"),
        ([make_classifier()], {"num_leaves": 0}, "num_leaves"),
    ],
)
def test_what_cannot_be_drawn_or_labelled_is_refused(models, options, message):
    with pytest.raises(ValueError, match=message):
        ob.synthetic_images(models, **({"shape": (3, 16, 16), "num_batches": 1, "batch_size": 2} | options))
