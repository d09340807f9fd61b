"""Changes of basis of tiny networks, counted by hand; each is verified in float64 as it is found."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from onebasin.programs.calls import read_calls
from onebasin.symmetries.layout import names as layout_names
from onebasin.symmetries.transform import TransformedSymmetry
from onebasin.symmetries.verification import Different, verify_programs
from onebasin.tensors.states import read_state
from onebasin.tracing import trace_calls
from tests.basis_networks import (
    MLP,
    Attention,
    BiasedAttention,
    ConvNet,
    ConvNeXt,
    D,
    Function,
    LayerScale,
    LoRA,
    Model,
    PackedAttention,
    Recurrent,
    RMSNorm,
    Shifted,
    Stacked,
    SwiGLU,
    Tied,
    ViewedAttention,
    Windows,
    WithBuffer,
    randomise_norms,
    with_gains,
)

TOKENS, IMAGES, ROWS = (2, 4, 3), (2, 3, 8, 8), (5, 3)
HEAD = [(4, "linear"), (4, "linear")]
"""Queries with keys, and values with outputs, of each head."""


def layers(count: int) -> list[nn.Module]:
    return [nn.LayerNorm(D) for _ in range(count)]


def weight_normed(model: nn.Module, layer: str, dim: int = 0) -> nn.Module:
    nn.utils.parametrizations.weight_norm(model.get_submodule(layer), dim=dim)
    return model


def drop(x):
    return F.dropout(x, 0.5, training=True)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[tuple[int, str]]]] = {
    "pre-LN": (lambda: Model([Attention(), MLP()], layers(3)), TOKENS, [(D, "centred"), *HEAD]),
    "pre-LN without biases": (
        lambda: Model([Attention(bias=False)], [nn.LayerNorm(D, bias=False) for _ in range(2)]),
        TOKENS,
        [(D, "centred"), *HEAD],
    ),
    "norms without gains": (
        lambda: Model([Attention()], [nn.LayerNorm(D, elementwise_affine=False) for _ in range(2)]),
        TOKENS,
        [(D, "centred"), *HEAD],
    ),
    "post-LN": (lambda: Model([Attention(), MLP()], layers(2), style="post"), TOKENS, [(D, "centred"), *HEAD]),
    "RMSNorm": (lambda: Model([MLP()], [nn.RMSNorm(D), nn.RMSNorm(D)]), TOKENS, [(D, "orthogonal")]),
    "RMSNorm by hand": (lambda: Model([MLP()], [RMSNorm(), RMSNorm()]), TOKENS, [(D, "orthogonal")]),
    "QK-norm without a gain": (
        lambda: Model([Attention(norm=nn.RMSNorm(4, elementwise_affine=False))], layers(2)),
        TOKENS,
        [(D, "centred"), (4, "linear"), (4, "orthogonal")],
    ),
    "QK-norm with a gain": (
        lambda: with_gains(Model([Attention(norm=RMSNorm(4))], [nn.Identity(), nn.Identity()])),
        TOKENS,
        [(D, "linear"), (4, "linear")],
    ),
    **{
        f"RoPE, {style}": (
            lambda style=style: Model([Attention(rotate=style)], layers(2)),
            TOKENS,
            [(D, "centred"), (4, "linear"), (2, "rotary")],
        )
        for style in ("halves", "interleaved", "complex")
    },
    "RoPE of a part": (
        lambda: Model([Attention(rotate="part")], layers(2)),
        TOKENS,
        [(D, "centred"), (4, "linear"), (2, "linear"), (2, "rotary")],
    ),
    "RoPE, one head of keys": (
        lambda: Model([Attention(kv_heads=1, rotate="halves")], layers(2)),
        TOKENS,
        [(D, "centred"), (4, "linear"), (2, "rotary")],
    ),
    "RoPE, packed": (lambda: Model([PackedAttention()], layers(2)), TOKENS, [(D, "centred"), (4, "linear"), (2, "rotary")]),
    "RoPE, halves in one layer and interleaved in another": (
        lambda: Model([Attention(rotate="halves"), Attention(rotate="interleaved")], layers(3)),
        TOKENS,
        [(D, "centred"), (4, "linear"), (2, "rotary"), (4, "linear"), (2, "rotary")],
    ),
    "RoPE behind norms": (
        lambda: Model([Attention(rotate="halves", norm=nn.RMSNorm(4, elementwise_affine=False))], layers(2)),
        TOKENS,
        [(D, "centred"), (4, "linear")],
    ),
    "trap: turned, but not in pairs": (
        lambda: Model([Attention(rotate="not in pairs")], layers(2)),
        TOKENS,
        [(D, "centred"), (4, "linear")],
    ),
    "grouped queries": (lambda: Model([Attention(4, 2)], layers(2)), TOKENS, [(D, "centred"), *HEAD]),
    "grouped queries, keys repeated in place": (
        lambda: Model([Attention(4, 2, interleaves=True)], layers(2)), TOKENS, [(D, "centred"), *HEAD]
    ),
    "RoPE, keys repeated in place": (
        lambda: Model([Attention(4, 2, rotate="halves", interleaves=True)], layers(2)),
        TOKENS,
        [(D, "centred"), (4, "linear"), (2, "rotary")],
    ),
    "multi-query": (lambda: Model([Attention(2, 1)], layers(2)), TOKENS, [(D, "centred"), *HEAD]),
    "SwiGLU": (lambda: Model([SwiGLU()], [RMSNorm(), RMSNorm()]), TOKENS, [(D, "orthogonal"), (12, "signed")]),
    "parallel": (lambda: Model([Attention(), MLP()], layers(1), "parallel"), TOKENS, [(D, "centred"), *HEAD]),
    "tied embeddings": (Tied, (2, 4), [(D, "orthogonal")]),
    "windows": (Windows, (2, 4, 4, 3), [(D, "centred"), *HEAD]),
    "LayerScale": (LayerScale, ROWS, [(D, "centred")]),
    "ConvNeXt": (ConvNeXt, IMAGES, []),
    "convolutions": (ConvNet, IMAGES, [(5, "linear")]),
    "low rank": (lambda: Function(nn.Identity()), ROWS, [(D, "linear")]),
    "LoRA": (LoRA, (3, 5), [(4, "linear")]),
    "LSTM": (Recurrent, TOKENS, [(5, "linear"), (6, "signed")]),
    "LSTM with a projection": (lambda: Recurrent(proj_size=4), TOKENS, [(5, "linear"), (6, "signed"), (4, "linear")]),
    "LSTM without biases": (lambda: Recurrent(bias=False), TOKENS, [(5, "linear"), (6, "signed")]),
    "GRU, both directions": (
        lambda: Recurrent(nn.GRU, bidirectional=True), TOKENS, [(5, "linear"), (6, "signed"), (6, "signed")]
    ),
    "RNN of two layers": (lambda: Recurrent(nn.RNN, num_layers=2), TOKENS, [(5, "linear"), (6, "signed"), (6, "signed")]),
    "RNN of ReLUs": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), TOKENS, [(5, "linear")]),
    "last state of an LSTM": (lambda: Recurrent(reads="state"), TOKENS, [(5, "linear"), (6, "signed")]),
    "last cell of an LSTM": (lambda: Recurrent(reads="cell"), TOKENS, [(5, "linear"), (6, "signed")]),
    "last states of two layers, the first not even permuted": (
        lambda: Recurrent(nn.GRU, reads="state", num_layers=2), TOKENS, [(5, "linear"), (6, "signed")]
    ),
    "trap: a first state that is not zero": (lambda: Recurrent(nn.GRU, start=1.0), TOKENS, [(5, "linear")]),
    "stacked as a|b": (lambda: Stacked(nn.Identity(), lambda x: x / x.norm(dim=-1, keepdim=True)), ROWS,
                       [(6, "linear"), (6, "orthogonal")]),
    "stacked as a|b, one not free": (lambda: Stacked(torch.sigmoid, nn.Identity()), ROWS, [(6, "linear")]),
    "stacked as a|b, signs": (lambda: Stacked(torch.tanh, nn.Identity()), ROWS, [(6, "linear")]),
    "weight norm": (lambda: weight_normed(Function(torch.relu), "first"), ROWS, []),
    "a reader with weight norm": (lambda: weight_normed(Function(nn.Identity()), "second"), ROWS, [(D, "orthogonal")]),
    "trap: weight norm over columns": (lambda: weight_normed(Function(nn.Identity()), "second", dim=1), ROWS, []),
    "T5": (
        lambda: Model([BiasedAttention(), MLP(F.relu, bias=False)], [RMSNorm() for _ in range(3)]),
        TOKENS,
        [(D, "orthogonal"), *HEAD],
    ),
    "linear autoencoder": (
        lambda: nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2), nn.Linear(2, 3), nn.Linear(3, 6)),
        (5, 6),
        [(3, "linear"), (2, "linear"), (3, "linear")],
    ),
    "a bias behind a rotation": (Shifted, ROWS, [(D, "orthogonal")]),
    "nothing between": (lambda: nn.Sequential(nn.Linear(3, D), nn.Linear(D, 4), nn.Tanh()), ROWS, [(D, "linear")]),
    "lengths": (lambda: Function(lambda x: x / x.norm(dim=-1, keepdim=True)), ROWS, [(D, "orthogonal")]),
    "cosine": (lambda: Function(lambda x: x * x.square().sum(-1, keepdim=True).rsqrt()), ROWS, [(D, "orthogonal")]),
    "cosine similarity": (
        lambda: Function(lambda x: F.cosine_similarity(x[1:], x[:-1], dim=-1)[:, None] * x[1:]), ROWS, [(D, "orthogonal")]
    ),
    "trap: cosine similarity along another axis": (
        lambda: Function(lambda x: F.cosine_similarity(x[1:], x[:-1], dim=0) * x), ROWS, []
    ),
    "units repeated": (lambda: Function(lambda x: x.repeat(1, 2)[:, :D]), ROWS, [(D, "linear")]),
    "the product with itself": (lambda: Function(lambda x: x / (x * x).mean(-1, keepdim=True)), ROWS, [(D, "orthogonal")]),
    "the mean taken out": (lambda: Function(lambda x: x - x.mean(-1, keepdim=True)), ROWS, [(D, "centred")]),
    "trap: gains": (lambda: with_gains(Model([MLP()], layers(2))), TOKENS, []),
    "trap: a table is added": (WithBuffer, TOKENS, []),
    "tanh": (lambda: Function(torch.tanh), ROWS, [(D, "signed")]),
    "tanh behind a batch norm": (lambda: Function(nn.Sequential(nn.BatchNorm1d(D), nn.Tanh())), ROWS, [(D, "signed")]),
    "trap: tanh beside sigmoid": (lambda: Function(lambda x: torch.tanh(x) + torch.sigmoid(x)), ROWS, []),
    "trap: a mean of tanh": (lambda: Function(lambda x: torch.tanh(x - x.mean(-1, keepdim=True))), ROWS, []),
    "squares": (lambda: Function(torch.square), ROWS, [(D, "signed")]),
    "squares of squares": (
        lambda: Function(lambda x: x / x.square().square().mean(-1, keepdim=True)), ROWS, [(D, "signed")]
    ),
    "powers": (lambda: Function(lambda x: x / x.pow(4).mean(-1, keepdim=True)), ROWS, [(D, "signed")]),
    "the largest": (lambda: Function(lambda x: x / x.abs().amax(-1, keepdim=True)), ROWS, [(D, "signed")]),
    "trap: another norm": (lambda: Function(lambda x: x / x.norm(p=1, dim=-1, keepdim=True)), ROWS, []),
    "trap: a number is added": (lambda: Function(lambda x: x + 1), ROWS, []),
    "a residual beside its norm": (lambda: Function(lambda x: F.layer_norm(x, (D,)) + x), ROWS, [(D, "centred")]),
    "trap: a residual beside its norm with a gain": (
        lambda: Function(lambda x: F.layer_norm(x, (D,), torch.linspace(1, 2, D).to(x)) + x),
        ROWS,
        [],
    ),
    "trap: skips the norm": (lambda: Function(lambda x: F.layer_norm(x, (D,)) + torch.tanh(x)), ROWS, []),
    "trap: softmax": (lambda: Function(lambda x: x.softmax(-1)), ROWS, []),
    "trap: sorted": (lambda: Function(lambda x: x.sort(-1).values), ROWS, []),
    "one unit multiplies all": (lambda: Function(lambda x: x * x[:, :1]), ROWS, [(D - 1, "linear")]),
    "trap: part of it is normalised": (
        lambda: Function(lambda x: torch.cat([F.layer_norm(x[:, :4], (4,)), x[:, 4:]], -1)),
        ROWS,
        [(4, "centred"), (4, "linear")],
    ),
}  # fmt: skip


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    build, shape, _ = CASES[name]
    torch.manual_seed(0)
    x = torch.randint(0, 11, shape) if name == "tied embeddings" else torch.randn(shape)
    return build().eval(), x


@pytest.mark.parametrize("name", CASES)
def test_kinds_counted_by_hand(name):
    model, x = make(name)
    symmetry = ob.symmetry(model, x, kinds="all")
    found = sorted((symmetry.sizes[basis.group], basis.kind) for basis in symmetry.bases.values())
    assert found == sorted(CASES[name][2])


TRAINED: dict[str, list[tuple[int, str]] | None] = {
    **dict.fromkeys(
        [
            "pre-LN", "pre-LN without biases", "norms without gains", "RMSNorm", "RMSNorm by hand", "QK-norm without a gain",
            "QK-norm with a gain", "RoPE, halves", "RoPE of a part", "RoPE, one head of keys", "RoPE, packed",
            "grouped queries", "multi-query", "SwiGLU", "parallel", "windows", "LayerScale", "ConvNeXt", "T5",
            "trap: a table is added",
        ]
    ),
    "post-LN": HEAD,  # what the first norm puts out is added to, and divided by the second: its gain distinguishes units
    "tied embeddings": [],  # the gain in front of the head would have to be folded into the embedding as well
    "trap: gains": [(D, "centred")],  # they are gains of norms before layers, which take them up
}  # fmt: skip
"""Networks whose gains and offsets are as training leaves them; what is counted in their canonical forms, and None if it is
what is counted where the gains are one."""


@pytest.mark.parametrize("name", TRAINED)
def test_kinds_of_canonical_forms_counted_by_hand(name):
    model, x = make(name)
    randomise_norms(model, ob.symmetry(model, x, kinds="all").gains)
    symmetry = ob.symmetry(ob.canonical(model, x).model, x, kinds="all")
    found = sorted((symmetry.sizes[basis.group], basis.kind) for basis in symmetry.bases.values())
    expected = TRAINED[name]
    assert found == sorted(CASES[name][2] if expected is None else expected)


def test_the_head_of_a_tied_network_takes_up_a_gain_if_it_is_untied():
    model, x = make("tied embeddings")
    randomise_norms(model, ob.symmetry(model, x, kinds="all").gains)
    form = ob.canonical(model, x, untie=True)
    assert [basis.kind for basis in ob.symmetry(form.model, x, kinds="all").bases.values()] == ["orthogonal"]


SCALES = {
    "pre-LN": 5,  # behind each norm, of queries against keys, and of values against outputs
    "norms without gains": 2,
    "pre-LN without biases": 4,  # two norms and two of the heads, without an MLP
    "post-LN": 3,  # the first norm's outputs are also added to what the second divides; the last norm, and two of the heads
    "RMSNorm": 2,  # behind both norms
    "RMSNorm by hand": 2,
    "parallel": 3,  # both branches read one norm; two of the heads
    "QK-norm without a gain": 3,  # behind two norms, and of values; queries and keys have a length
    "QK-norm with a gain": 2,  # of the stream, which has no norm, and of values; one gain is squared in the scores
    "RoPE, halves": 4,  # behind two norms, of values, and one number for all queries of a head against its keys
    "RoPE, interleaved": 4,
    "grouped queries": 4,  # behind two norms, and two of the heads of keys
    "grouped queries, keys repeated in place": 4,
    "multi-query": 4,
    "tied embeddings": 0,  # the embedding is divided by its length, so the head has no scale, and the norm none against it
    "windows": 7,  # behind the norm, two of the heads, and each of the four tokens that are merged behind their norm
    "ConvNeXt": 1,  # behind the norm, which is used twice
    "LSTM": 1,  # between the first layer and the gates
    "GRU, both directions": 1,
    "linear autoencoder": 3,
    "a bias behind a rotation": 0,
    "squares": 1,  # whose degree is two
    "SwiGLU": 3,  # behind both norms, and of the branch that is no gate
    "T5": 6,  # behind three norms, of hidden units, and two of the heads
    "convolutions": 4,  # filters before a norm, what is behind it, and the units of two more layers
    "weight norm": 2,  # of directions alone; and of lengths against the reader
    "a reader with weight norm": 0,
    "low rank": 1,
    "LoRA": 2,  # between the thin layers, and of the hidden units
    "tanh": 0,
    "tanh behind a batch norm": 1,  # of the layer before it
    "trap: gains": 2,
}
"""Positive scales of some of them."""


@pytest.mark.parametrize("name", SCALES)
def test_scales_counted_by_hand(name):
    model, x = make(name)
    assert len(ob.symmetry(model, x, kinds="positive").scales) == SCALES[name]


@pytest.mark.parametrize("name", [name for name in CASES if "RoPE" not in name])  # a rotary basis has scales of its own
def test_a_scale_is_left_out_only_for_a_basis_of_its_units(name):
    """On a gain that stays one for the basis, or on what the basis mixes. All others that "positive" finds are found."""
    model, x = make(name)
    positive, found = (ob.symmetry(model, x, kinds=kinds) for kinds in ("positive", "all"))
    mixing = {basis.group for basis in found.bases.values() if basis.kind != "signed"}
    assert found.scales.items() <= positive.scales.items()
    assert all(scale.group in mixing for n, scale in positive.scales.items() if n not in found.scales)
    assert all(not mixing.isdisjoint(layout_names(found.layouts[key])) for key in found.fixed)


class Inside(nn.Module):
    """A stream, and a branch with a norm of its own in front of its ReLU."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.before, self.after = nn.Linear(3, D), nn.Linear(D, 2), nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.inside, self.down = nn.Linear(D, 12), nn.LayerNorm(12), nn.Linear(12, D)

    def forward(self, x):
        x = self.embed(x)
        return self.head(self.after(x + self.down(self.inside(self.up(self.before(x))).relu())))


class Cube(nn.Module):
    def forward(self, x):
        return x**3


def behind(norm: nn.Module, *further: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, D), norm, *further, nn.Linear(D, 2))


def images(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, D, 3), norm, nn.ReLU(), nn.Conv2d(D, 2, 3))


FRESH: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str], list[str], list[str]]] = {
    # scales, bases, and what stays filled with one number
    "group norm": (lambda: images(nn.GroupNorm(2, D)), IMAGES, ["1.weight:2"], [], []),
    "group norm, a group for each unit": (lambda: images(nn.GroupNorm(D, D)), IMAGES, ["1.weight"], [], []),
    "instance norm": (lambda: images(nn.InstanceNorm2d(D, affine=True)), IMAGES, ["1.weight"], [], []),
    "batch norm": (lambda: images(nn.BatchNorm2d(D)), IMAGES, ["0.weight", "1.weight"], [], []),
    "layer norm": (lambda: behind(nn.LayerNorm(D), nn.ReLU()), ROWS, ["1.weight"], [], []),
    "two layer norms": (
        lambda: behind(nn.LayerNorm(D), nn.ReLU(), nn.Linear(D, D), nn.LayerNorm(D), nn.ReLU()),
        ROWS,
        ["1.weight", "4.weight"],
        [],
        [],
    ),
    "signs need no gain of one": (lambda: behind(nn.RMSNorm(D), Cube()), ROWS, ["1.weight"], ["0.weight"], []),
    "a norm inside a branch": (Inside, ROWS, ["inside.weight"], ["embed.weight"], ["before.weight", "after.weight"]),
}


@pytest.mark.parametrize("name", FRESH)
def test_scales_of_fresh_gains(name):
    """They are free unless a change of basis needs them to be one. The function is that of before in float64."""
    build, shape, scales, bases, fixed = FRESH[name]
    torch.manual_seed(0)
    model, x = build().eval().double(), torch.randn(shape).double()
    symmetry = ob.symmetry(model, x, kinds="all")
    assert (list(symmetry.scales), list(symmetry.bases), list(symmetry.fixed)) == (scales, bases, fixed)
    expected = model(x)
    transform = ob.Transform.random(symmetry, torch.Generator().manual_seed(1))
    moved = transform.apply(model)
    torch.testing.assert_close(torch.func.functional_call(model, moved, x), expected, rtol=1e-9, atol=1e-11)
    again = transform.apply(moved)  # gains that are not one any more are no obstacle
    torch.testing.assert_close(torch.func.functional_call(model, again, x), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", FRESH)
def test_canonical_forms_of_trained_gains(name):
    """What is folded is found as in a fresh network, and the transform of the canonical form computes what the model did."""
    build, shape, scales, bases, _ = FRESH[name]
    torch.manual_seed(0)
    model, x = build().eval().double(), torch.randn(shape).double()
    for value in model.parameters():
        if value.dim() == 1:
            nn.init.uniform_(value, 0.5, 1.5)
    form = ob.canonical(model, x)
    symmetry = ob.symmetry(form.model, x, kinds="all")
    assert (list(symmetry.scales), list(symmetry.bases)) == (scales, bases)
    moved = ob.Transform.random(symmetry, torch.Generator().manual_seed(1)).apply(form.model)
    torch.testing.assert_close(torch.func.functional_call(model, moved, x), model(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "name",
    ["pre-LN", "RMSNorm by hand", "grouped queries", "tied embeddings", "windows", "LoRA", "RoPE, packed", "SwiGLU"],
)
def test_the_function_is_unchanged(name):
    model, x = make(name)
    model, x = model.double(), x.double() if x.is_floating_point() else x
    transform = ob.Transform.random(ob.symmetry(model, x, kinds="all"), torch.Generator().manual_seed(1))
    before = model(x)
    model.load_state_dict(transform.apply(model))
    assert torch.allclose(model(x), before, rtol=1e-9, atol=1e-11)


def test_bases_of_stacked_weights_change_their_own_part():
    model, x = make("stacked as a|b")
    model, x = model.double(), x.double()
    symmetry = ob.symmetry(model, x, kinds="all")
    transform = ob.Transform.random(symmetry, torch.Generator().manual_seed(1))
    before = model(x)
    for number, group in enumerate(symmetry.groups):
        moved = transform.only(group).apply(model)
        for key, value in model.state_dict().items():
            assert torch.equal(moved[key][1 - number], value[1 - number])
            assert not torch.allclose(moved[key][number], value[number])
        torch.testing.assert_close(torch.func.functional_call(model, moved, x), before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["linear", "orthogonal"])
def test_a_kind_that_is_too_free_is_found_out(kind):
    model, x = make("pre-LN")
    symmetry = ob.symmetry(model, x, kinds="all")
    stream = next(basis for basis in symmetry.bases.values() if basis.kind == "centred")
    wrong = replace(symmetry, bases={stream.name: replace(stream, kind=kind)})
    _, programs = trace_calls(model, read_calls(x))
    with pytest.raises(Different, match="embed"):
        verify_programs(TransformedSymmetry(wrong), programs, read_state(model))


def test_readers_take_the_dual_matrix():
    model, x = make("low rank")
    (basis,) = ob.symmetry(model, x, kinds="all").bases.values()
    assert basis.name == "first.weight"
    assert basis.places == {
        "first.weight": ((0, 0, False),), "first.bias": ((0, 0, False),), "second.weight": ((1, 0, True),)
    }  # fmt: skip


@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_several_calls_have_the_bases_of_one(num_calls):
    torch.manual_seed(0)
    model = Model([ViewedAttention(), MLP()], layers(3)).eval()
    calls = [torch.randn(1 + number, 4 + number, 3) for number in range(num_calls)]
    symmetry = ob.symmetry(model, calls, kinds="all")
    found = sorted((symmetry.sizes[basis.group], basis.kind) for basis in symmetry.bases.values())
    assert found == sorted([(D, "centred"), *HEAD])


def test_train_mode_with_dropout_does_not_stand_in_the_way():
    torch.manual_seed(0)
    model = Model([nn.Sequential(MLP(), nn.Dropout(0.3))], layers(2)).eval()
    assert [basis.kind for basis in ob.symmetry(model, torch.randn(TOKENS), kinds="all").bases.values()] == ["centred"]
    model = Function(drop)
    assert not ob.symmetry(model.eval(), torch.randn(ROWS), verify=False, kinds="all").bases


def test_permutations_are_what_they_are_without_bases():
    model, x = make("pre-LN")
    plain, found = ob.symmetry(model, x), ob.symmetry(model, x, kinds="all")
    assert (plain.groups, plain.layouts, plain.bases) == (found.groups, found.layouts, {})


def test_what_is_not_found_on_the_meta_device_is_said():
    model, x = make("pre-LN")
    for kinds in ("permutation", "all"):
        found = ob.symmetry(model.to("meta"), x.to("meta"), kinds=kinds)
        assert any("on the meta device" in limit for limit in found.limits) == (kinds == "all")
        assert not any(basis.kind in ("centred", "orthogonal", "rotary") for basis in found.bases.values())
