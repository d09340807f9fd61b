"""A twin computes what its network computes, moves with the same permutations, and folds back."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.landscape.batch_norm import reset_statistics
from onebasin.landscape.normalised_twin import fold_twin, make_twin
from onebasin.symmetries import Transform
from onebasin.tensors.states import read_state


class Tokens(nn.Module):
    """A linear layer whose units are the last of three axes."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu().mean(1))


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 5), nn.ReLU(), nn.Linear(5, 2))
    )


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)), (64, 4)),
    "cnn": (cnn, (64, 2, 6, 6)),
    "tokens": (Tokens, (64, 3, 4)),
}


def make(name):
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model, x = build(), torch.randn(shape)
    return model, ob.symmetry(model, x[:2]), x


@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_function_and_the_same_groups(name):
    model, symmetry, x = make(name)
    twin, extended = make_twin(model, symmetry, [x])
    torch.testing.assert_close(twin(x), model(x), rtol=1e-4, atol=1e-5)
    assert extended.groups == symmetry.groups
    assert make_twin(twin, extended, [x]) is None
    extended.verify(twin, x[:8])
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    moved = copy.deepcopy(model)
    moved.load_state_dict(permutation.apply(model))
    twin_of_moved, _ = make_twin(moved, symmetry, [x])
    moved_twin = ob.Permutation(extended, permutation.indices).apply(twin)
    for key, value in read_state(twin_of_moved).items():
        torch.testing.assert_close(value, moved_twin[key], rtol=1e-4, atol=1e-6)


def test_a_network_with_norms_has_no_twin():
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2))
    x = torch.randn(8, 2, 6, 6)
    assert make_twin(model.eval(), ob.symmetry(model, x), [x]) is None


def test_the_midpoint_of_twins_is_the_repaired_midpoint():
    a, symmetry, x = make("mlp")
    b = copy.deepcopy(a)
    for parameter in b.parameters():
        nn.init.normal_(parameter, std=0.5)
    twins = [make_twin(model, symmetry, [x])[0] for model in (a, b)]
    middle = copy.deepcopy(twins[0])
    middle.load_state_dict(ob.interpolate(twins, [0.5, 0.5]))
    middle.eval()
    reset_statistics(middle, [x])
    mixed = copy.deepcopy(a)
    mixed.load_state_dict(ob.interpolate([a, b], [0.5, 0.5]))
    mixed.load_state_dict(ob.repair(mixed, [a, b], [x], symmetry).state)
    torch.testing.assert_close(middle(x), mixed(x), rtol=0.05, atol=0.02)  # running variances are unbiased, repair's are not


@pytest.mark.parametrize("name", ["mlp", "cnn", "tokens"])
def test_a_twin_folds_back_and_has_more_scales(name):
    model, _, x = make(name)
    symmetry = ob.symmetry(model, x[:2], kinds="positive")
    twin, extended = make_twin(model, symmetry, [x])
    folded = torch.func.functional_call(model, fold_twin(twin, model), (x,))
    torch.testing.assert_close(folded, model(x), rtol=1e-4, atol=1e-5)
    assert extended.scales.keys() == symmetry.scales.keys()
    assert len(ob.symmetry(twin, x[:2], kinds="positive").scales) == 2 * len(symmetry.scales)
    exact, x = copy.deepcopy(twin).double(), x.double()
    scaled = Transform.random(extended, torch.Generator().manual_seed(0)).apply(exact)
    torch.testing.assert_close(torch.func.functional_call(exact, scaled, (x,)), exact(x), rtol=1e-9, atol=1e-11)


def test_norms_count_in_a_layer_that_pytorch_would_compute_in_one_kernel():
    """Without gradients, too, and in a network that looks up the weights of its layers."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval()
    x = torch.randn(16, 3, 8)
    made = make_twin(model, ob.symmetry(model, x[:2]), [x])
    assert made is not None
    twin, _ = made
    with torch.no_grad():
        torch.testing.assert_close(twin(x), model(x), rtol=1e-4, atol=1e-5)
        before = twin(x)
        for norm in (module for module in twin.modules() if isinstance(module, nn.BatchNorm1d)):
            norm.bias.add_(1.0)
        assert (twin(x) - before).abs().max() > 0.1
