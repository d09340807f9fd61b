import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import onebasin as ob
from onebasin.relaxation import mixing
from onebasin.relaxation.mixing import mix, mix_all
from onebasin.relaxation.plans import plans_of
from onebasin.symmetries.gather import gather
from onebasin.symmetries.layout import gather_indices

AXES = {
    "plain": "h i",
    "twice": "h h",
    "flattened": "o (h 3)",
    "heads": "(h d) o",
    "heads apart": "h d o",
    "both axes nested": "(h d) (h e)",
    "packed": "(h d)+(h e)+(h d) i",
    "sum inside": "(h (d+e)) i",
    "three levels": "o (h d u)",
    "grouped convolution": "(h d) e 2",
    "transposed": "e 2 (h d)",
    "interleaved": "(d h) i",
    "fixed parent": "f g",
    "fixed parent inside": "i (f g)",
    "bias": "h",
    "untouched": "2 2",
}
FREE = ["h", "d[h]", "e[h]", "u[h,d]", "g[f]"]


@st.composite
def states(draw):
    """Tensors for the axes above, with sizes drawn at random."""
    size = {name: draw(st.integers(1, 4)) for name in "hdeuifgo"}
    shapes = {
        "plain": ("h", "i"), "twice": ("h", "h"), "flattened": ("o", "h*3"), "heads": ("h*d", "o"),
        "heads apart": ("h", "d", "o"),
        "both axes nested": ("h*d", "h*e"), "packed": ("h*d+h*e+h*d", "i"), "sum inside": ("h*(d+e)", "i"),
        "three levels": ("o", "h*d*u"), "grouped convolution": ("h*d", "e", "2"), "transposed": ("e", "2", "h*d"),
        "interleaved": ("d*h", "i"), "fixed parent": ("f", "g"), "fixed parent inside": ("i", "f*g"), "bias": ("h",),
        "untouched": ("2", "2"),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return {
        key: torch.randn([eval(axis, {}, size) for axis in shape], generator=generator, dtype=torch.float64)
        for key, shape in shapes.items()
    }, generator


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@given(states())
@settings(max_examples=40, deadline=None)
def test_group_laws(drawn):
    state, generator = drawn
    symmetry = ob.Symmetry.from_axes(AXES, FREE, state)
    a, b, c = (symmetry.random(generator) for _ in range(3))
    one = symmetry.identity()
    assert equal((a @ b).apply(state), a.apply(b.apply(state)))
    assert (a @ b) @ c == a @ (b @ c)
    assert a @ a.inverse() == one == a.inverse() @ a
    assert a @ one == a == one @ a
    assert (a @ b).inverse() == b.inverse() @ a.inverse()
    assert equal(a.inverse().apply(a.apply(state)), state)
    assert a.agreement(a) == 1.0


@given(states())
@settings(max_examples=40, deadline=None)
def test_soft_with_permutation_matrices_is_hard(drawn):
    state, generator = drawn
    symmetry = ob.Symmetry.from_axes(AXES, FREE, state)
    permutation = symmetry.random(generator)
    plans = plans_of(permutation, torch.float64)
    moved = permutation.apply(state)
    together = mix_all(state, symmetry.layouts, plans, symmetry.parents)
    for key, layout in symmetry.layouts.items():
        torch.testing.assert_close(mix(state[key], layout, plans, symmetry.parents), moved[key])
        torch.testing.assert_close(together[key], moved[key])


@pytest.mark.parametrize("join", [0, 1000])
def test_tensors_mixed_together_are_those_mixed_alone(join, monkeypatch):
    """Any plans, not permutations only; vectors of one group, of two, and in another type; a batch of tensors of one shape
    that move by other groups or along other axes; a group on two axes; one that stays. Side by side, as on CUDA, and not."""
    monkeypatch.setitem(mixing._JOINED_NUMEL, "cpu", join)
    torch.manual_seed(0)
    axes = {"w": "a b", "conv": "b a 3", "one": "a", "two": "a", "three": "b", "stays": "i"}
    axes |= {"v": "c b", "rows": "c j", "kernel": "b c 3", "square": "b b"}
    shapes = {"w": (5, 4), "conv": (4, 5, 3), "one": (5,), "two": (5,), "three": (4,), "stays": (7,)}
    shapes |= {"v": (5, 4), "rows": (5, 4), "kernel": (4, 5, 3), "square": (4, 4)}
    state = {key: torch.randn(shape, dtype=torch.float64) for key, shape in shapes.items()}
    state["two"] = state["two"].float()
    symmetry = ob.Symmetry.from_axes(axes, ["a", "b", "c"], state)
    plans = {name: torch.rand(size, size, dtype=torch.float64) for name, size in (("a", 5), ("b", 4), ("c", 5))}
    free = {name: plan.clone().requires_grad_() for name, plan in plans.items()}
    together = mix_all(state, symmetry.layouts, free, symmetry.parents)
    alone = {key: mix(value, symmetry.layouts[key], free, symmetry.parents) for key, value in state.items()}
    gradients = [
        torch.autograd.grad(sum(value.double().square().sum() for value in mixed.values()), list(free.values()))
        for mixed in (together, alone)
    ]
    torch.testing.assert_close(*gradients)
    found = {key: value.detach() for key, value in together.items()}
    a, b, c = plans["a"], plans["b"], plans["c"]
    torch.testing.assert_close(found["w"], a @ state["w"] @ b.T)
    torch.testing.assert_close(found["v"], c @ state["v"] @ b.T)
    torch.testing.assert_close(found["rows"], c @ state["rows"])
    torch.testing.assert_close(found["square"], b @ state["square"] @ b.T)
    torch.testing.assert_close(found["kernel"], torch.einsum("Bb,bck,Cc->BCk", b, state["kernel"], c))
    torch.testing.assert_close(found["conv"], torch.einsum("Bb,bak,Aa->BAk", b, state["conv"], a))
    torch.testing.assert_close(found["one"], a @ state["one"])
    torch.testing.assert_close(found["two"], (a @ state["two"].double()).float())
    torch.testing.assert_close(found["three"], b @ state["three"])
    assert together["stays"] is state["stays"]


@given(states())
@settings(max_examples=10, deadline=None)
def test_new_h_d_is_old_s_h_p_h_d(drawn):
    """The convention itself, written as loops."""
    state, generator = drawn
    symmetry = ob.Symmetry.from_axes(AXES, FREE, state)
    p = symmetry.random(generator)
    old, new = state["heads apart"], p.apply(state)["heads apart"]
    for h in range(old.shape[0]):
        for d in range(old.shape[1]):
            assert torch.equal(new[h, d], old[p["h"][h], p["d"][h, d]])
    old, new = state["grouped convolution"], p.apply(state)["grouped convolution"]
    size = symmetry.groups["d"].size
    for h in range(p["h"].numel()):
        for d in range(size):
            row = p["h"][h] * size + p["d"][h, d]
            assert torch.equal(new[h * size + d], old[row][p["e"][h]])


@given(states())
@settings(max_examples=10, deadline=None)
def test_save_and_load(tmp_path_factory, drawn):
    state, generator = drawn
    permutation = ob.Symmetry.from_axes(AXES, FREE, state).random(generator)
    path = tmp_path_factory.mktemp("permutation") / "p.safetensors"
    permutation.save(path)
    loaded = ob.Permutation.load(path)
    assert loaded == permutation
    assert equal(loaded.apply(state), permutation.apply(state))
    assert [p.name for p in path.parent.iterdir()] == ["p.safetensors"]


def test_soft_is_differentiable():
    state = {"w": torch.randn(6, 5, dtype=torch.float64), "v": torch.randn(3, 6, dtype=torch.float64)}
    state["s"] = torch.ones(2, dtype=torch.float64)
    symmetry = ob.Symmetry.from_axes({"w": "(h d) i", "v": "o (h d)", "s": "h"}, ["h", "d[h]"], state)
    plans = {
        "h": torch.rand(2, 2, dtype=torch.float64, requires_grad=True),
        "d": torch.rand(2, 2, 3, 3, dtype=torch.float64, requires_grad=True),
    }

    def soft(h, d, w):
        return mix(w, symmetry.layouts["w"], {"h": h, "d": d}, symmetry.parents)

    assert torch.autograd.gradcheck(soft, (*plans.values(), state["w"].requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8])
@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 3, 3), (7, 5, 1, 1), (300, 1000)])
def test_gather_of_every_type(dtype, shape):
    tensor = torch.randint(-100, 100, shape).to(dtype)
    symmetry = ob.Symmetry.from_axes(
        {"w": "a b" + " 3 3" * (shape[2:] == (3, 3)) + " 1 1" * (shape[2:] == (1, 1))},
        ["a", "b"],
        {"w": tensor},
    )
    p = symmetry.random()
    indices = gather_indices(symmetry.layouts["w"], p.indices, symmetry.parents)
    for source in (tensor, tensor.transpose(0, 1).contiguous().transpose(0, 1)):
        moved = gather(source, indices)
        assert moved.dtype == dtype
        assert torch.equal(moved, tensor[p["a"]][:, p["b"]])


def test_ties_stay_one_tensor():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    symmetry = ob.symmetry(nn.Sequential(nn.Linear(3, 4), model, nn.Linear(4, 2)), torch.zeros(1, 3))
    state = symmetry.random().apply(nn.Sequential(nn.Linear(3, 4), model, nn.Linear(4, 2)))
    assert state["1.0.weight"] is state["1.2.weight"]


def test_tied_values_that_differ_are_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[2].weight = model[1].weight
    permutation = ob.symmetry(model, torch.zeros(1, 3)).random()
    state = model.state_dict()
    permutation.apply({key: value for key, value in state.items() if key != "2.weight"})
    with pytest.raises(ValueError, match=r"'1.weight' and '2.weight' are one tied tensor"):
        permutation.apply({**state, "2.weight": state["2.weight"] + 1})


def trained_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.Adam(p, lr=0.01),
    lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    lambda p: torch.optim.AdamW(list(p)[::-1], lr=0.01, amsgrad=True),
])  # fmt: skip
def test_optimizer_state_travels(make):
    """Training on after permuting model and optimiser is permuting after training on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    optimizer = make(model.parameters())
    for _ in range(3):
        trained_step(model, optimizer, x)
    permutation = ob.symmetry(model, x).random()
    twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    twin.load_state_dict(permutation.apply(model))
    twin_optimizer = make(twin.parameters())
    before = optimizer.state_dict()["state"][0]
    twin_optimizer.load_state_dict(permutation.apply_optimizer(optimizer, model))
    assert all(torch.equal(v, optimizer.state_dict()["state"][0][k]) for k, v in before.items())
    for _ in range(3):
        trained_step(model, optimizer, x)
        trained_step(twin, twin_optimizer, x)
    expected = permutation.apply(model)
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-14)


def test_factored_moments_and_foreign_parameters_are_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    permutation = ob.symmetry(model, torch.zeros(1, 4)).random()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["row"] = torch.zeros(8)
    with pytest.raises(ValueError, match="factored states cannot be permuted"):
        permutation.apply_optimizer(optimizer, model)
    with pytest.raises(ValueError, match="not one of the model's"):
        permutation.apply_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), model)


class TestRefusals:
    symmetry = ob.symmetry(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda s: s.pop("2.bias"), "the state has no '2.bias'"),
            (
                lambda s: s.update(extra=torch.ones(1)),
                "the state has 'extra', which the symmetry does not know",
            ),
            (
                lambda s: s.update({"0.weight": torch.ones(9, 4)}),
                r"'0.weight' has shape \(9, 4\), the symmetry expects \(8, 4\)",
            ),
        ],
    )
    def test_first_difference_is_named(self, change, message):
        state = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).state_dict()
        change(state)
        with pytest.raises(ValueError, match=message):
            self.symmetry.identity().apply(state)

    def test_not_a_model(self):
        with pytest.raises(TypeError, match=r"expected a torch.nn.Module or a state dict, got list"):
            self.symmetry.identity().apply([1])

    @pytest.mark.parametrize(
        ("indices", "message"),
        [
            ({}, "no index for the group '0.weight'"),
            ({"0.weight": torch.zeros(8, dtype=torch.long)}, "is not a permutation of 0 ... 7"),
            ({"0.weight": torch.arange(7)}, r"has shape \(7,\), expected \(8,\)"),
            ({"0.weight": torch.arange(8), "x": torch.arange(2)}, "no group 'x'"),
        ],
    )
    def test_indices(self, indices, message):
        with pytest.raises(ValueError, match=message):
            ob.Permutation(self.symmetry, indices)

    def test_files(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            ob.Permutation.load(tmp_path / "nothing")
        damaged = tmp_path / "p.safetensors"
        self.symmetry.random().save(damaged)
        whole = damaged.read_bytes()
        for content in (
            b"",
            b"not a file",
            whole[:50],
            whole[:-8],
            whole.replace(b"onebasin permutation 1", b"onebasin permutation 9"),
        ):
            damaged.write_bytes(content)
            with pytest.raises(ValueError, match=r"p.safetensors"):
                ob.Permutation.load(damaged)
        with pytest.raises(ValueError, match="does not exist"):
            self.symmetry.random().save(tmp_path / "no" / "p.safetensors")
        with pytest.raises(ValueError, match="is a folder"):
            self.symmetry.random().save(tmp_path)

    def test_another_symmetry(self):
        other = ob.symmetry(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2)), torch.zeros(1, 4))
        with pytest.raises(ValueError, match="different symmetries"):
            self.symmetry.identity() @ other.identity()
        assert self.symmetry.identity() != other.identity()


class TestFromAxes:
    @pytest.mark.parametrize(
        ("axes", "free", "message"),
        [
            ({"w": "h (i"}, ["h"], "a parenthesis is not closed"),
            ({"w": "h )"}, ["h"], "unexpected"),
            ({"w": "h +"}, ["h"], "ends too early"),
            ({"w": "h i"}, ["x"], "'x' does not occur"),
            ({"w": "h i"}, ["h["], "cannot read the free name"),
            ({"w": "h d"}, ["h", "d[g]"], "'g' does not occur"),
            ({"w": "h d", "b": "d"}, ["h", "d[h]"], "'b': axis 0 of 'd' depends on 'h'"),
            ({"w": "h h d"}, ["h", "d[h]"], "exactly one other axis"),
            ({"w": "(h d u)"}, ["h", "d[h]", "u[d]"], "must name the parents of 'd' before it"),
        ],
    )
    def test_refuses(self, axes, free, message):
        with pytest.raises(ValueError, match=message):
            ob.Symmetry.from_axes(axes, free)

    def test_learns_sizes(self):
        symmetry = ob.Symmetry.from_axes({"fc1.weight": "h i", "fc2.weight": "o (h 49)"}, free=["h"])
        with pytest.raises(ValueError, match="bind the symmetry to a model first"):
            symmetry.identity()
        state = {"fc1.weight": torch.ones(3, 5), "fc2.weight": torch.ones(2, 147), "other": torch.ones(4)}
        bound = symmetry.bind(state)
        assert bound.groups["h"].size == 3
        assert bound.layouts["other"][0].size == 4
        with pytest.raises(ValueError, match=r"'fc2.weight'"):
            symmetry.bind({**state, "fc2.weight": torch.ones(2, 98)})
        with pytest.raises(ValueError, match="has 1 axes, its pattern"):
            symmetry.bind({**state, "fc2.weight": torch.ones(2)})
        with pytest.raises(ValueError, match="cannot be told from the shapes"):
            ob.Symmetry.from_axes({"w": "(a b)"}, ["a"], {"w": torch.ones(6)})

    def test_verifies(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        good = ob.Symmetry.from_axes({"0.weight": "h i", "0.bias": "h", "2.weight": "o h"}, ["h"])
        assert good.verify(model, torch.randn(3, 4)) < 1e-12
        forgotten = ob.Symmetry.from_axes({"0.weight": "h i", "2.weight": "o h"}, ["h"])
        with pytest.raises(ValueError, match=r"permuting changes the function on this model's weights.*'h'"):
            forgotten.verify(model, torch.randn(3, 4))

    def test_serves_models_that_cannot_be_traced(self):
        class Branch(nn.Sequential):
            def forward(self, x):
                return super().forward(x if x.sum() > 0 else -x)

        model = Branch(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        with pytest.raises(ValueError, match="write the symmetry by hand"):
            ob.symmetry(model, torch.ones(1, 4))
        by_hand = ob.Symmetry.from_axes({"0.weight": "h i", "0.bias": "h", "2.weight": "o h"}, ["h"])
        assert by_hand.verify(model, torch.ones(1, 4)) < 1e-12
        by_hand.bind(model).random().apply(model)
