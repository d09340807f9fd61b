"""Single operations between two linear maps: which matrices they let through."""

import pytest
import torch
from torch.nn import functional as F

import onebasin as ob
from tests.basis_networks import D, Function

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def kinds(between) -> list[str]:
    torch.manual_seed(0)
    return [basis.kind for basis in ob.symmetry(Function(between).eval(), X, kinds="all").bases.values()]


def normalise(variance, mean, x):
    return (x - mean) / (variance + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda x: 2 * x, ["linear"]),
        (lambda x: x / 3, ["linear"]),
        (lambda x: -x.clone(), ["linear"]),
        (lambda x: x + x, ["linear"]),
        (lambda x: x.flip(0), ["linear"]),
        (lambda x: x[:, None, :].expand(5, 2, D).sum(1), ["linear"]),
        (lambda x: F.dropout(x, 0.5, training=False), ["linear"]),
        (lambda x: F.rms_norm(x, (D,)), ["orthogonal"]),
        (lambda x: F.normalize(x, dim=-1), ["orthogonal"]),
        (lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True), ["orthogonal"]),
        (lambda x: F.layer_norm(x, (D,)), ["centred"]),
        (lambda x: x + x.mean(-1, keepdim=True), ["centred"]),
        (lambda x: x / x.mean(-1, keepdim=True), ["centred"]),
        (lambda x: x / x.std(-1, keepdim=True), ["centred"]),
        (lambda x: x / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt(), ["centred"]),
        (lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), ["centred"]),
        (lambda x: normalise(*torch.var_mean(x, -1, keepdim=True), x), ["centred"]),
        (lambda x: x / x.std(), ["centred"]),
        (lambda x: x / x.var((0, 1)), ["centred"]),
        (lambda x: x / (x.std(-1, keepdim=True) + x.amax(-1, keepdim=True)), []),
        (lambda x: torch.tanh(x / x.std(-1, keepdim=True)), []),
        (lambda x: x / x.std(0), ["signed"]),
        (lambda x: x * x.var(0, keepdim=True), ["signed"]),
        (lambda x: x / (x * x).std(-1, keepdim=True), ["signed"]),
        (lambda x: torch.relu(x), []),
        (lambda x: x / (1 + x * x), ["signed"]),
        (lambda x: torch.tanh(x), ["signed"]),
        (lambda x: F.hardtanh(x, -2, 2), ["signed"]),
        (lambda x: F.hardtanh(x, -1, 2), []),
        (lambda x: torch.tanh(x * x), ["signed"]),
        (lambda x: torch.tanh(x) * torch.sigmoid(x), []),
        (lambda x: x * x * x, ["signed"]),
        (lambda x: x * x * x * x, ["signed"]),
        (lambda x: x**3, ["signed"]),
        (lambda x: x**3 + x, ["signed"]),
        (lambda x: x**3 + x**4, []),
        (lambda x: x**4, ["signed"]),
        (lambda x: (2 + x * x) ** -1, ["signed"]),
        (lambda x: x.abs() ** 1.5, ["signed"]),
        (lambda x: torch.tanh(x).pow(0.5 * x), []),
        (lambda x: 2**x, []),
        (lambda x: x.clamp(-1, 1), ["signed"]),
        (lambda x: x.clip(-0.5, 0.5), ["signed"]),
        (lambda x: x.clamp(-1, 2), []),
        (lambda x: x.clamp(1, -1), []),
        (lambda x: x.clamp(max=1), []),
        (lambda x: x.clamp(torch.tensor(-1.0), torch.tensor(1.0)), []),
        (lambda x: torch.tanh(x).mean(-1, keepdim=True) + x, []),
        (lambda x: x // 2, []),
        (lambda x: 1 / x, []),
        (lambda x: x.abs(), ["signed"]),
        (lambda x: F.layer_norm(x.view(5, 2, D // 2), (D // 2,)).flatten(1), ["centred"]),
        (lambda x: x.view(5, 2, D // 2).softmax(1).flatten(1), []),
    ],
)  # fmt: skip
def test_what_an_operation_lets_through(between, expected):
    assert kinds(between) == expected
