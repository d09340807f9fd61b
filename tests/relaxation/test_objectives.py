from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.relaxation.objectives import each_tied_once, parameter_keys


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss(output, expected):
    return nn.functional.mse_loss(output, expected)


BATCH = (torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    "objective",
    [ob.WeightDistance(kind) for kind in ("l2", "l1", "inner", "cosine")]
    + [ob.Midpoint(loss), ob.RandomPoint(loss, low=0.2)],
    ids=["l2", "l1", "inner", "cosine", "midpoint", "random point"],
)
def test_gradients_against_finite_differences(objective):
    """Through the objective, the soft application and the operator, down to the logits."""
    model, other = small(), small()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p))
    symmetry = ob.symmetry(model, BATCH[0])
    # many rounds: the implicit gradient is that of the fixed point
    net = ob.RebasinNet(model, symmetry, noise=0.5, num_iters=300, generator=torch.Generator().manual_seed(1))
    target = other.state_dict()
    bound = objective.bind(model)

    def cost(*logits):
        torch.manual_seed(0)
        soft = torch.func.functional_call(net, dict(zip(net.state_dict(), logits, strict=True)))
        return bound(soft, target, BATCH)

    assert torch.autograd.gradcheck(cost, tuple(p.detach().requires_grad_() for p in net.parameters()), atol=1e-6)


def test_weight_distance_counts_parameters_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    assert parameter_keys(model) == ("0.weight", "0.bias", "1.weight", "1.bias", "2.bias")
    zeros = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    ones = {key: torch.ones_like(value) for key, value in model.state_dict().items()}
    assert ob.WeightDistance().bind(model)(ones, zeros) == 9 + 4 * 3
    assert ob.WeightDistance("l1").bind(model)(ones, zeros) == 9 + 4 * 3


def test_the_two_distances_order_hard_permutations_alike():
    model, other = small(), small()
    symmetry = ob.symmetry(model, BATCH[0])
    permutations = [symmetry.random() for _ in range(10)]
    target = {key: torch.randn_like(value) for key, value in other.state_dict().items()}
    costs = [
        [float(ob.WeightDistance(kind)(p.apply(model), target)) for p in permutations] for kind in ("l2", "inner", "cosine")
    ]
    orders = [sorted(range(10), key=column.__getitem__) for column in costs]
    assert orders[0] == orders[1] == orders[2]


def test_batch_norm_uses_batch_statistics_in_between():
    """Stored statistics are wrong in between: a network with absurd ones must not notice."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    x, y = torch.rand(8, 1, 8, 8), torch.rand(8, 2)
    objective = ob.Midpoint(loss).bind(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    absurd = {key: value.clone() * 1000 if "running" in key else value for key, value in state.items()}
    clone = {key: value.clone() for key, value in state.items()}
    torch.testing.assert_close(objective(state, clone, (x, y)), objective(absurd, clone, (x, y)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ob.WeightDistance("l3"), "kind must be"),  # type: ignore[arg-type]
        (lambda: ob.RandomPoint(loss, low=0.5, high=0.5), "0 <= low < high <= 1"),
        (lambda: ob.Midpoint(loss)({}, {}, BATCH), "call bind"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", [ob.Midpoint, ob.RandomPoint])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"loss": "cross_entropy"}, "loss must be a function"), ({"loss": loss, "repaired": "yes"}, "repaired must be True")],
)
def test_what_is_no_loss_or_no_choice_is_refused(kind, arguments, message):
    with pytest.raises(TypeError, match=message):
        kind(**arguments)


def test_objectives_that_run_the_network_need_it():
    with pytest.raises(TypeError, match="give align modules, not state dicts"):
        ob.Midpoint(loss).bind({})


def test_of_tied_keys_the_first_that_is_there_is_kept():
    by_hand = ob.Symmetry.from_axes({"a": "h i", "b": "h i", "c": "h i", "d": "h"}, free=["h"])
    symmetry = replace(by_hand, ties=(("a", "b", "c"),))
    assert each_tied_once("abcd", symmetry) == ("a", "d")
    assert each_tied_once("dcb", symmetry) == ("d", "b")
