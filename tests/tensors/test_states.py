import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.tensors.states import LazyState, read_state
from tests.networks import CASES

NAMES = ["mlp relu", "batch norm 2d", "attention by hand", "grouped conv", "tied embedding", "lstm", "densenet"]


def lazily(model):
    return read_state(model).lazily()


def planted(name: str):
    torch.manual_seed(0)
    model, inputs = CASES[name].make(), CASES[name].inputs()
    symmetry = ob.symmetry(model, inputs)
    permutation = symmetry.random(torch.Generator().manual_seed(1))
    return model, symmetry, permutation


class Counting(LazyState):
    """Hands out fresh tensors and counts how many are alive."""

    def __init__(self, state: dict[str, torch.Tensor]):
        self.alive = weakref.WeakSet()
        self.most = self.reads = 0
        self.state = state
        super().__init__({key: value.to("meta") for key, value in state.items()}, self.hand_out)

    def hand_out(self, key: str) -> torch.Tensor:
        value = self.state[key].clone()
        self.alive.add(value)
        self.reads += 1
        self.most = max(self.most, len(self.alive))
        return value


@pytest.mark.parametrize("name", NAMES)
def test_lazy_states_align_as_loaded_ones_do(name):
    model, symmetry, permutation = planted(name)
    twin = permutation.apply(model)
    loaded = ob.align(twin, to=model.state_dict(), symmetry=symmetry, method="weight-matching")
    lazy = ob.align(lazily(twin), to=lazily(model), symmetry=symmetry, method="weight-matching")
    assert lazy.permutation == loaded.permutation
    assert lazy.cost == pytest.approx(loaded.cost, abs=1e-9)
    assert isinstance(lazy.model, LazyState)
    assert all(torch.equal(lazy.model[key], value) for key, value in loaded.model.items())


def test_no_state_is_held_whole():
    widths = [4, *[16] * 12, 2]
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*layers)
    symmetry = ob.symmetry(model, torch.zeros(1, 4))
    first, second = (Counting(dict(m)) for m in (model.state_dict(), symmetry.random().apply(model)))
    gc.disable()  # what lives must live by reference, not until the collector comes
    try:
        result = ob.align(second, to=first, symmetry=symmetry, method="weight-matching")
        mixed = ob.interpolate([first, result.model], [0.5, 0.5])
        for key, value in mixed.items():
            torch.testing.assert_close(value, first.state[key])
    finally:
        gc.enable()
    assert result.cost == 0.0
    assert max(first.most, second.most) <= 4 < len(first)
    assert second.reads > len(second)


def test_lazy_states_of_half_precision_are_matched_in_float32():
    model, symmetry, permutation = planted("mlp relu")
    half = {key: value.bfloat16() for key, value in model.state_dict().items()}
    result = ob.align(lazily(permutation.apply(half)), to=lazily(half), symmetry=symmetry, method="weight-matching")
    assert result.permutation == permutation.inverse()
    assert all(value.dtype == torch.bfloat16 for value in result.model.values())


@pytest.mark.parametrize("method", ["sinkhorn", "weight-matching"])
def test_other_methods_load_them(method):
    model, symmetry, permutation = planted("mlp relu")
    twin = lazily(permutation.apply(model))
    result = ob.align(twin, to=lazily(model), symmetry=symmetry, method=method)
    assert result.permutation == permutation.inverse()


def test_states_are_merged_lazily():
    model, symmetry, _ = planted("mlp relu")
    twins = [lazily(symmetry.random(torch.Generator().manual_seed(seed)).apply(model)) for seed in (1, 2)]
    for to in ("first", "mean"):
        merged = ob.merge([lazily(model), *twins], symmetry=symmetry, reference=to)
        assert isinstance(merged, LazyState)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(merged[key], value)
    with pytest.raises(ValueError, match="repair needs the networks"):
        ob.merge([lazily(model), *twins], symmetry=symmetry, repair=[torch.zeros(1, 3)])


def test_tied_tensors_count_once_and_may_be_left_out():
    model, symmetry, permutation = planted("tied embedding")
    state = permutation.apply(model)
    (tied,) = symmetry.ties
    shorter = {key: value for key, value in state.items() if key not in tied[1:]}
    full = ob.align(lazily(state), to=lazily(model), symmetry=symmetry, method="weight-matching")
    kept = {key: value for key, value in model.state_dict().items() if key not in tied[1:]}
    short = ob.align(lazily(shorter), to=lazily(kept), symmetry=symmetry, method="weight-matching")
    assert short.start_cost == pytest.approx(full.start_cost)
    different = {**state, tied[1]: state[tied[1]] + 1}
    with pytest.raises(ValueError, match="are one tied tensor in the model, but their values differ"):
        permutation.apply(lazily(different))


def test_mapping():
    lazy = lazily(nn.Linear(2, 3))
    assert list(lazy) == ["weight", "bias"]
    assert "weight" in lazy
    assert len(lazy) == 2
    assert lazy.num_entries == 9
    assert lazy.num_bytes == 36
    assert lazy.to("cpu", torch.float64)["bias"].dtype == torch.float64
    assert repr(lazy) == "LazyState(2 tensors, 0.0 MB)"
    with pytest.raises(KeyError):
        lazy["missing"]
    with pytest.raises(ValueError, match="different architectures"):
        ob.interpolate([lazy, lazily(nn.Linear(2, 4))], [0.5, 0.5])


def test_work_is_tracked():
    model, symmetry, permutation = planted("mlp relu")
    for method, what in (("weight-matching", "sweep 1"), ("sinkhorn", "descent"), ("ste", "descent")):
        seen: list[tuple[str, int, int]] = []
        ob.align(
            permutation.apply(model), to=model.state_dict(), symmetry=symmetry, method=method,
            progress=lambda *entry, seen=seen: seen.append(entry), detect_copy=False,
        )  # fmt: skip
        assert seen[0][:2] == (what, 0)
        assert all(0 <= done < total for _, done, total in seen)


def test_a_permuted_state_is_saved_as_a_plain_state_dict(tmp_path):
    model, _, permutation = planted("tied embedding")
    state = permutation.apply(model)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert list(loaded) == list(state)
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert read_state(loaded).load().ties == state.ties
