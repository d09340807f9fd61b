import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.programs.calls import read_calls
from onebasin.programs.isolation import evaluation_mode
from onebasin.symmetries.gather import gather
from onebasin.symmetries.indices import gather_indices
from onebasin.symmetries.layout import factors
from onebasin.tensors.states import read_state
from tests.networks import CASES

pytestmark = pytest.mark.filterwarnings("ignore::onebasin.UnreachedWarning")  # of the one network that has some


def randomise(model: nn.Module) -> nn.Module:
    """Random weights and norm statistics, in float64."""
    generator = torch.Generator().manual_seed(1)
    model.double()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            noise = torch.rand(value.shape, generator=generator, dtype=value.dtype)
            value.copy_(0.5 + noise if name.endswith("running_var") else noise - 0.4)
    return model


def to_double(example_inputs):
    return torch.utils._pytree.tree_map(
        lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, example_inputs
    )


def outputs(model: nn.Module, state, example_inputs) -> list[Tensor]:
    (call,) = read_calls(example_inputs)
    with evaluation_mode(model), torch.no_grad():
        result = torch.func.functional_call(model, state, call.args, call.kwargs)
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]


def written(symmetry: ob.Symmetry) -> list[str]:
    """The groups as the table of networks writes them."""
    sizes = symmetry.sizes
    result = []
    for group in symmetry.groups.values():
        parents = [f"{sizes[p]}{'' if p in symmetry.groups else '*'}" for p in group.parents]
        result.append(str(group.size) + (f"[{','.join(parents)}]" if parents else ""))
    return sorted(result)


@pytest.fixture(params=CASES, scope="module")
def case(request):
    torch.manual_seed(0)
    entry = CASES[request.param]
    model = randomise(entry.make())
    inputs = to_double(entry.inputs())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        symmetry = ob.symmetry(model, inputs)
    assert bool(caught) == (request.param == "unused parameters")
    return entry, model, inputs, symmetry


def test_groups_are_those_a_person_counts(case):
    entry, _, _, symmetry = case
    assert written(symmetry) == entry.groups, f"\n{symmetry}"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_function_is_unchanged(case, seed):
    _, model, inputs, symmetry = case
    state = read_state(model)
    expected = outputs(model, state, inputs)
    permutation = symmetry.random(torch.Generator().manual_seed(seed))
    moved = permutation.apply(model)
    for e, f in zip(expected, outputs(model, moved, inputs), strict=True):
        assert (e - f).abs().max() <= 1e-9 * max(float(e.abs().max()), 1e-3)
    if permutation != symmetry.identity():
        assert any(not torch.equal(moved[key], state[key]) for key in state)


def test_nothing_is_mutated(case):
    _, model, inputs, _ = case
    model.train()
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    ob.symmetry(model, inputs).random().apply(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert modes == [m.training for m in model.modules()]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_sites_are_where_groups_live(case):
    """A hooked activation of the permuted model is the permuted activation."""
    _, model, inputs, symmetry = case
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    sites = {site for found in symmetry.sites.values() for site in found}
    seen: dict[tuple[str, int], list[Tensor]] = {}
    handles = []
    for path in {site.module for site in sites}:
        counter: list[int] = []

        def hook(module, args, output, path=path, counter=counter):
            seen.setdefault((path, len(counter)), []).append(output[0] if isinstance(output, tuple) else output)
            counter.append(1)

        handles.append((model.get_submodule(path).register_forward_hook(hook), counter))
    for state in (read_state(model), permutation.apply(model)):
        outputs(model, state, inputs)
        for _, counter in handles:
            counter.clear()
    for handle, _ in handles:
        handle.remove()
    for site in sites:
        plain, moved = seen[site.module, site.call]
        indices = gather_indices(site.layout, permutation.indices, symmetry.parents)
        torch.testing.assert_close(moved, gather(plain, indices), rtol=1e-9, atol=1e-9)


def test_every_named_factor_has_its_size(case):
    _, model, _, symmetry = case
    for key, value in model.state_dict().items():
        assert tuple(term.size for term in symmetry.layouts[key]) == tuple(value.shape)
        for term in symmetry.layouts[key]:
            assert all(symmetry.sizes[f.name] == f.size for f in factors(term) if f.name)


class Branching(nn.Module):
    """Linear maps with something between them that depends on a size."""

    def __init__(self, is_different: Callable[[Tensor], bool]):
        super().__init__()
        self.first, self.second, self.is_different = nn.Linear(3, 5), nn.Linear(5, 2), is_different

    def forward(self, x):
        hidden = self.first(x)
        return self.second(torch.expm1(hidden) if self.is_different(x) else hidden)


@pytest.mark.parametrize("is_different", [lambda x: len(x) == 1, lambda x: x.shape[1] > 4], ids=["batch", "length"])
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("kinds", ["positive", "all"])
def test_scales_and_bases_hold_at_other_sizes_too(is_different, is_large, kinds, monkeypatch):
    if is_large:  # other sizes are not verified then
        monkeypatch.setattr("onebasin.tracing.MAX_ENTRIES", 0)
    symmetry = ob.symmetry(Branching(is_different), torch.randn(2, 4, 3), kinds=kinds)
    assert list(symmetry.groups) == ["first"]
    assert not symmetry.scales
    assert not symmetry.bases
    plain = ob.symmetry(Branching(lambda x: False), torch.randn(2, 4, 3), kinds=kinds)
    assert plain.scales or plain.bases
