"""A widened network computes what the narrow one does, in float64; what cannot be widened is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.matching.widening import is_narrower


def perturb(model: nn.Module) -> nn.Module:
    """Values that tell every unit apart, gains and statistics too."""
    for value in (*model.parameters(), *model.buffers()):
        if value.is_floating_point():
            value.data += 0.1 + 0.2 * torch.rand_like(value)
    return model.eval()


def mlp(first: int, second: int, num_outputs: int = 10) -> nn.Module:
    layers = [nn.Linear(6, first), nn.GELU(), nn.Linear(first, second), nn.Sigmoid(), nn.Linear(second, num_outputs)]
    return nn.Sequential(*layers)


def cnn(first: int, second: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, first, 3, padding=1), nn.BatchNorm2d(first), nn.ReLU(),
        nn.Conv2d(first, second, 3), nn.BatchNorm2d(second), nn.ReLU(), nn.Flatten(), nn.Linear(second * 16, 10),
    )  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * self.weight


class Attention(nn.Module):
    """Four projections without biases; the scale is that of the size of a head, or one."""

    def __init__(self, width: int, num_heads: int, size: int, is_scaled: bool):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(width, num_heads * size, bias=False) for _ in range(3))
        self.out = nn.Linear(num_heads * size, width)
        self.num_heads, self.scale = num_heads, size**-0.5 if is_scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.queries, self.keys, self.values))
        return self.out((((q @ k.mT) * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """One block. The norms come before the layers, or after the residual sums."""

    def __init__(
        self, width: int, num_heads: int = 2, size: int = 4, *, norm=nn.LayerNorm, first: bool = True, tied: bool = False,
        is_scaled: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.attention = Attention(width, num_heads, size, is_scaled)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norms = nn.ModuleList(norm(width) for _ in range(3))
        self.head = nn.Linear(width, 11, bias=False)
        self.first = first
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer, norm in zip((self.attention, self.mlp), self.norms, strict=False):
            x = x + layer(norm(x)) if self.first else norm(x + layer(x))
        return self.head(self.norms[2](x))


IDS = torch.arange(10).view(2, 5)


def plain_norm(width: int) -> nn.Module:
    return nn.LayerNorm(width, elementwise_affine=False)


CASES = {
    "MLP": (lambda: (mlp(5, 4), mlp(8, 4)), torch.randn(3, 6)),
    "CNN with batch norm": (lambda: (cnn(3, 4), cnn(5, 7)), torch.randn(2, 2, 6, 6)),
    "LayerNorm": (lambda: (Transformer(8), Transformer(12)), IDS),
    "LayerNorm without gains": (lambda: (Transformer(8, norm=plain_norm), Transformer(12, norm=plain_norm)), IDS),
    "RMSNorm": (lambda: (Transformer(8, norm=RMSNorm), Transformer(13, norm=RMSNorm)), IDS),
    "RMSNorm, tied": (lambda: (Transformer(8, norm=RMSNorm, tied=True), Transformer(12, norm=RMSNorm, tied=True)), IDS),
    "LayerNorm, tied": (lambda: (Transformer(8, tied=True), Transformer(16, tied=True)), IDS),
    "norms behind": (lambda: (Transformer(8, first=False), Transformer(24, first=False)), IDS),
    "more heads": (lambda: (Transformer(8, 2), Transformer(12, 3)), IDS),
    "larger heads": (lambda: (Transformer(8, 2, 4), Transformer(12, 2, 6)), IDS),
    "larger heads of scale one": (
        lambda: (Transformer(8, 2, 4, is_scaled=False), Transformer(12, 2, 6, is_scaled=False)),
        IDS,
    ),
    "nothing to do": (lambda: (mlp(5, 4), mlp(5, 4)), torch.randn(3, 6)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_function_is_the_same(name):
    torch.manual_seed(0)
    make, inputs = CASES[name]
    narrow, like = map(perturb, make())
    narrow, like = narrow.double(), like.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    before = [copy.deepcopy(model.state_dict()) for model in (narrow, like)]
    wide = ob.widen(narrow, like=like, example_inputs=inputs)
    shapes = {key: value.shape for key, value in like.state_dict().items()}
    assert {key: value.shape for key, value in wide.state_dict().items()} == shapes
    assert torch.allclose(wide(inputs), narrow(inputs), rtol=1e-10, atol=1e-12)
    for model, state in zip((narrow, like), before, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_tied_tensors_stay_tied_and_types_are_those_of_the_wide_one():
    torch.manual_seed(0)
    narrow, like = (perturb(Transformer(n, tied=True)) for n in (8, 16))
    wide = ob.widen(narrow, like.half(), IDS)
    assert wide.head.weight is wide.embedding.weight
    assert wide.head.weight.dtype == torch.float16
    assert torch.allclose(wide.float()(IDS), narrow(IDS), atol=0.02)


@pytest.mark.parametrize(
    ("narrow", "like", "message"),
    [
        (lambda: mlp(5, 4), lambda: mlp(4, 4), "would have to shrink"),
        (lambda: mlp(5, 4), lambda: mlp(5, 4, num_outputs=12), "not free units"),
        (lambda: mlp(5, 4), lambda: nn.Sequential(*mlp(5, 4), nn.ReLU(), nn.Linear(10, 10)), "more than their width"),
        (lambda: mlp(5, 4), lambda: nn.Sequential(nn.Linear(6, 8)), "more than their width"),
    ],
)
def test_networks_that_differ_in_more_are_refused(narrow, like, message):
    with pytest.raises(ValueError, match=message):
        ob.widen(narrow(), like(), torch.randn(3, 6))


def test_what_counts_units_is_refused():
    def make(width: int) -> nn.Module:
        layers = [nn.Conv2d(2, width, 3), nn.GroupNorm(2, width), nn.ReLU(), nn.Conv2d(width, 3, 4), nn.Flatten()]
        return perturb(nn.Sequential(*layers))

    with pytest.raises(ValueError, match="counts units in a way that is not allowed for"):
        ob.widen(make(4), make(8), torch.randn(2, 2, 6, 6))
    # A mean over the units, of which nothing is known when the model is traced.
    with pytest.raises(ValueError, match=r"counts units|not free units"):
        ob.widen(
            *(perturb(nn.Sequential(nn.Linear(6, n), nn.Softmax(-1), nn.Linear(n, 3))) for n in (4, 6)), torch.ones(1, 6)
        )


def test_what_is_no_network_or_no_number_is_refused():
    with pytest.raises(TypeError, match="like is a OrderedDict"):
        ob.widen(mlp(5, 4), mlp(6, 4).state_dict(), torch.ones(1, 6))  # pyright: ignore
    broken = mlp(5, 4)
    broken[0].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="the model to widen"):
        ob.widen(broken, mlp(6, 4), torch.ones(1, 6))


def test_narrower():
    assert is_narrower(mlp(5, 4), mlp(6, 4))
    assert not is_narrower(mlp(5, 4), mlp(5, 4))
    assert not is_narrower(mlp(5, 6), mlp(6, 5))
    assert not is_narrower(mlp(5, 4), nn.Sequential(nn.Linear(6, 8)))


@pytest.mark.parametrize("make", [lambda n: mlp(n, 2 * n), lambda n: cnn(n, n + 2)])
def test_a_permuted_wider_copy_is_found_exactly(make):
    torch.manual_seed(0)
    narrow, like = perturb(make(5)), perturb(make(9))
    inputs = torch.randn(2, 6) if isinstance(narrow[0], nn.Linear) else torch.randn(2, 2, 6, 6)
    target = ob.widen(narrow, like, inputs)
    target.load_state_dict(ob.symmetry(target, inputs).random(torch.Generator().manual_seed(0)).apply(target))
    for method in ("auto", "weight-matching"):
        found = ob.align(narrow, to=target, example_inputs=inputs, method=method, detect_copy=method == "auto")
        assert found.cost < 1e-10
        assert "widened" in found.notes[0]
        assert torch.allclose(found.model(inputs), narrow(inputs), atol=1e-5)


def test_a_narrow_model_needs_inputs_to_be_widened():
    narrow, wide = mlp(5, 4), mlp(6, 4)
    with pytest.raises(ValueError, match="give example_inputs= or data= to widen"):
        ob.align(narrow, to=wide, symmetry=ob.symmetry(wide, torch.ones(1, 6)))
    data = [(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))]
    assert "widened" in ob.align(narrow, to=wide, data=data, method="activation-matching").notes[0]
    with pytest.raises(ValueError, match="different architectures"):
        ob.align(wide, to=narrow, example_inputs=torch.ones(1, 6))
