"""Rules that readings share: the same network has the same scales and bases however its linear maps are written."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from tests.basis_networks import D, Function
from tests.cases import Fn, weight

GRID = torch.tensor([[[[0.0, -0.3], [0.0, 0.4]]]])
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    """A linear map, ReLU, a linear map, a linear map: each of the last two is written in one way."""

    def __init__(self, write):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(n, m)) for n, m in ((6, 3), (5, 6), (2, 5)))
        self.write = write

    def forward(self, x):
        return self.write(self.write(torch.relu(x @ self.a.T), self.b), self.c)


@pytest.mark.parametrize(
    "write",
    [
        nn.functional.linear,
        lambda x, w: x @ w.T,
        lambda x, w: torch.matmul(w, x.mT).mT,
        lambda x, w: torch.einsum("ni,oi->no", x, w),
        lambda x, w: (x[:, None, :] * w).sum(-1),
        lambda x, w: nn.functional.conv1d(x.unsqueeze(-1), w.unsqueeze(-1)).squeeze(-1),
        lambda x, w: torch.tensordot(x, w.T, dims=1),
        torch.inner,
        lambda x, w: torch.bmm(x[None], w.T[None])[0],
        lambda x, w: torch.stack([torch.mv(w, row) for row in x]) if len(x) < 5 else x @ w.T,
        lambda x, w: nn.functional.bilinear(x, torch.ones(len(x), 1).to(x), w[..., None]),
        lambda x, w: torch.stack([x @ w.T, x @ w.T]).mean(0),
    ],
)
def test_linear_maps_however_they_are_written(write):
    torch.manual_seed(0)
    symmetry = ob.symmetry(Written(write), torch.randn(4, 3), kinds="all")
    assert [(scale.name, scale.group) for scale in symmetry.scales.values()] == [("a", "a")]
    assert [(basis.name, basis.kind) for basis in symmetry.bases.values()] == [("b", "linear")]


def kinds(model, x=X) -> list[str]:
    return [basis.kind for basis in ob.symmetry(model.eval(), x, kinds="all").bases.values()]


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda x: x.cumsum(0), ["linear"]),
        (lambda x: x.cumsum(1), []),
        (lambda x: x.cumprod(0), []),
        (lambda x: torch.outer(torch.arange(len(x)).to(x), x[0]), ["linear"]),
        (lambda x: torch.outer(x.norm(dim=-1), x[0]), ["orthogonal"]),
        (lambda x: F.pad(x.mT[None], (1, 1), mode="reflect")[0].mT, ["linear"]),
        (lambda x: F.pad(x.mT[None], (1, 1), mode="replicate")[0].mT, ["linear"]),
        (lambda x: F.pad(x.mT[None], (1, 1), mode="circular")[0].mT, ["linear"]),
        (lambda x: F.pad(x, (0, 0, 1, 1)), ["linear"]),
        (lambda x: F.pad(x, (0, 0, 1, 1), value=1.0), []),
        (lambda x: F.unfold(x.mT[None, :, :, None], (2, 1)).view(1, D, 2, -1)[0, :, 1].mT, ["linear"]),
        (lambda x: F.grid_sample(x.mT[None, :, :, None], GRID.to(x), align_corners=False)[0, :, 0].mT, ["linear"]),
        (lambda x: torch.lerp(x, x.flip(0), 0.3), ["linear"]),
        (lambda x: torch.lerp(x, x.flip(0), torch.rand(5, 1).to(x)[: len(x)]), ["linear"]),
        (lambda x: torch.lerp(x, x.flip(0), torch.linspace(0, 1, D).to(x)), []),
        (lambda x: torch.lerp(x, torch.tanh(x), 0.3), ["signed"]),
        (lambda x: torch.lerp(x, x.flip(0), x.square().mean(-1, keepdim=True)), ["orthogonal"]),
        (lambda x: torch.lerp(x, x.flip(0), x.square()), ["signed"]),
        (lambda x: torch.addcmul(x, x.flip(0), x.square().mean(-1, keepdim=True), value=2), ["orthogonal"]),
        (lambda x: torch.addcmul(torch.zeros_like(x), x.flip(0), x.square().mean(-1, keepdim=True)), ["orthogonal"]),
        (lambda x: torch.addcmul(x, x, x.square()), ["signed"]),
        (lambda x: torch.addcmul(x, x, x), []),
        (lambda x: torch.addcdiv(x, x.flip(0), x.norm(dim=-1, keepdim=True), value=2), ["orthogonal"]),
        (lambda x: torch.addcdiv(x, x.flip(0), 1 + x.square()), ["signed"]),
        (lambda x: torch.addcdiv(x, x.square(), x), []),
        (lambda x: torch.div(x, 3, rounding_mode="floor"), []),
    ],
)
def test_sums_of_products(between, expected):
    torch.manual_seed(0)
    assert kinds(Function(between)) == expected


def test_the_branch_of_a_gated_unit_that_is_no_gate_changes_its_sign_and_its_scale():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2 * D), nn.GLU(), nn.Linear(D, 2))
    assert kinds(model) == ["signed"]
    (scale,) = ob.symmetry(model, X, kinds="positive").scales.values()
    assert {key: [power.number for power in powers] for key, powers in scale.powers.items()} == {
        "0.weight": [0], "0.bias": [0], "2.weight": [0]
    }  # fmt: skip


def test_a_gate_fixes_what_its_units_stand_beside():
    """Its sigmoid is taken of what another axis scales."""
    torch.manual_seed(0)
    members = {"first": weight(4, 3), "gated": weight(1, 2 * D), "read": weight(4)}
    model = Fn(lambda self, x: F.glu((x @ self.first.mT)[..., None] * self.gated[0], -1).mT @ self.read, **members)
    symmetry = ob.symmetry(model, torch.randn(3), kinds="all", verify=False)
    assert "first" not in {key for basis in symmetry.bases.values() for key in basis.places}
    assert "first" not in {key for scale in symmetry.scales.values() for key in scale.powers}


def test_both_operands_of_a_bilinear_map_have_a_basis():
    torch.manual_seed(0)
    model = Fn(
        lambda self, x: self.meet(self.left(x), self.right(x)),
        **{"left": nn.Linear(3, 4), "right": nn.Linear(3, 5), "meet": nn.Bilinear(4, 5, 2)},
    )
    assert kinds(model) == ["linear", "linear"]
    assert len(ob.symmetry(model, X, kinds="positive").scales) == 2


@pytest.mark.parametrize(("mode", "expected"), [("sum", ["linear"]), ("mean", ["linear"]), ("max", [])])
def test_bags_of_rows(mode, expected):
    torch.manual_seed(0)
    bags = nn.Sequential(nn.EmbeddingBag(7, D, mode=mode), nn.Linear(D, 2))
    assert kinds(bags, torch.randint(7, (3, 4))) == expected


def experts(function):
    """Tokens go to the two best of five experts; each multiplies the tokens that are sorted to it by its own matrices."""

    def forward(self, x):
        x = torch.nn.functional.rms_norm(self.embed(x), (D,))
        shares, chosen = self.router(x).softmax(1).topk(2)
        expert, before = chosen.flatten().sort()
        offsets = torch.histc(expert.float(), 5, 0, 4).cumsum(0, dtype=torch.int32)
        hidden = nn.functional.grouped_mm(x[before // 2], self.up.mT.contiguous().mT, offs=offsets)
        hidden = function(hidden + self.bias[expert])
        results = nn.functional.grouped_mm(hidden, self.down.mT.contiguous().mT, offs=offsets)
        results = results * shares.flatten()[before][:, None]
        inverse = torch.empty_like(before)
        inverse[before] = torch.arange(before.size(0))
        x = x + results[inverse].view(-1, 2, D).sum(1)
        return self.head(torch.nn.functional.rms_norm(x, (D,)))

    torch.manual_seed(0)
    members = {"embed": nn.Linear(3, D), "router": nn.Linear(D, 5), "head": nn.Linear(D, 2)}
    return Fn(forward, **members, up=weight(5, D, 12), bias=weight(5, 12), down=weight(5, 12, D))


@pytest.mark.parametrize(
    ("function", "kind", "num_scales"),
    [(torch.relu, None, 1), (torch.tanh, "signed", 0), (nn.functional.gelu, None, 0), (lambda h: h, "linear", 1)],
)
def test_experts_whose_rows_are_sorted(function, kind, num_scales):
    """The stream is rotated, and the units of each expert have what their function lets through."""
    model = experts(function)
    found = ob.symmetry(model, X, kinds="all")
    assert {basis.name: basis.kind for basis in found.bases.values()} == {
        "embed.weight": "orthogonal", **({"up": kind} if kind else {})
    }  # fmt: skip
    assert found.sizes["up"] == 5
    assert found.bases.get("up") is None or found.bases["up"].parents == ("up",)
    assert len(ob.symmetry(model, X, kinds="positive").scales) == num_scales
