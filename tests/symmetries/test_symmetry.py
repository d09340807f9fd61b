import pytest
import torch
from hypothesis import given, settings
from torch import nn

import onebasin as ob
from onebasin.symmetries.mixing import mix
from onebasin.tensors.states import read_state
from tests.symmetries.axis_patterns import AXES, FREE, states


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


def test_ties_stay_one_tensor():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    symmetry = ob.symmetry(nn.Sequential(nn.Linear(3, 4), model, nn.Linear(4, 2)), torch.zeros(1, 3))
    state = symmetry.random().apply(nn.Sequential(nn.Linear(3, 4), model, nn.Linear(4, 2)))
    assert state["1.0.weight"] is state["1.2.weight"]


def test_large_states_move_as_their_tensors_do(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("onebasin.symmetries.gather._THREAD_BYTES", 1 << 20)
    model = nn.Sequential(nn.Linear(3, 1100), nn.Linear(1100, 1100), nn.Tanh(), nn.Linear(1100, 1100), nn.BatchNorm1d(1100))
    model.extend([nn.ReLU(), nn.Linear(1100, 1000)])
    model[3].weight = model[1].weight
    permutation = ob.symmetry(model.eval(), torch.zeros(1, 3), verify=False).random()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    moved = permutation.apply(model)
    assert moved["1.weight"] is moved["3.weight"]
    assert equal(moved, {key: permutation.move_tensor(key, value) for key, value in state.items()})
    assert equal(moved, permutation.apply(read_state(model).lazily()))
    assert equal(permutation.inverse().apply(moved), state)
    assert equal(model.state_dict(), state)


def test_tied_values_that_differ_are_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[2].weight = model[1].weight
    permutation = ob.symmetry(model, torch.zeros(1, 3)).random()
    state = model.state_dict()
    permutation.apply({key: value for key, value in state.items() if key != "2.weight"})
    with pytest.raises(ValueError, match=r"'1.weight' and '2.weight' are one tied tensor"):
        permutation.apply({**state, "2.weight": state["2.weight"] + 1})


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
