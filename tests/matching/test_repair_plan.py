"""When `merge` repairs what it made."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.scaling import Scaling
from tests.matching.test_merging import X, mlp


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[key]) for key, value in a.state_dict().items())


def test_a_merge_is_repaired_where_there_is_data():
    models = [mlp(seed) for seed in range(2)]
    options = {"example_inputs": X, "method": "weight-matching"}
    merged, plain = ob.merge(models, data=[X], **options), ob.merge(models, **options)
    assert same(merged, ob.merge(models, data=[X], repair="repair", **options))
    assert same(plain, ob.merge(models, data=[X], repair=None, **options))
    assert not same(merged, plain)
    for changed in ({"weights": [1.5, -0.5]}, {"layer_weights": {"0.*": [1, 0]}}):
        assert same(ob.merge(models, data=[X], **options, **changed), ob.merge(models, **options, **changed))


def test_a_repair_that_does_not_lower_the_loss_is_not_kept():
    models = [mlp(seed) for seed in range(2)]
    told, kept = [], []
    for sign in (1, -1):  # the repaired merge has the larger outputs
        loss = ob.Midpoint(lambda output, _, sign=sign: sign * output.square().mean(), repaired=True)
        options = {"example_inputs": X, "objective": loss, "data": [(X, None)], "method": "weight-matching"}
        merged, plain = ob.merge(models, on_repair=told.append, **options), ob.merge(models, repair=None, **options)
        kept.append(same(merged, plain))
    assert kept == [True, False]
    assert told[0] is None
    assert told[1].repaired == ("0", "2")


@pytest.mark.parametrize(("repair", "seen"), [("auto", True), ("repair", True), ("norms", False), (None, False)])
@pytest.mark.parametrize("kinds", ["permutation", "positive"])
def test_alignments_see_the_networks_that_repair_makes(repair, seen, kinds):
    models = [mlp(seed) for seed in range(2)]
    options = {"data": [(X, None)], "kinds": kinds, "repair": repair, "scaling": Scaling(steps=2)}
    merged, expected = (
        ob.merge(models, objective=ob.Midpoint(lambda output, _: -output.square().mean(), repaired=repaired), **options)
        for repaired in (None, seen)
    )
    assert same(merged, expected)


@pytest.mark.parametrize("start", [{"groups": ["*"]}, {}])
def test_alignments_with_an_objective_start_from_transforms(start):
    models = [mlp(seed) for seed in range(2)]
    symmetry = ob.symmetry(models[0], X, kinds="positive")
    init = ob.Transform.random(symmetry, torch.Generator().manual_seed(0))
    loss = ob.Midpoint(lambda output, _: output.square().mean())
    options = {"objective": loss, "data": [(X, None)], "kinds": "positive", "scaling": Scaling(steps=2), **start}
    assert isinstance(ob.merge(models, init=init, **options), nn.Module)


def test_a_network_without_layers_to_repair_is_merged_as_it_is():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = (nn.Parameter(torch.randn(size)) for size in ((3, 4), (4, 2)))

        def forward(self, x):
            return torch.relu(x @ self.w) @ self.v

    models = [Bare(), Bare()]
    assert same(ob.merge(models, data=[X]), ob.merge(models, data=[X], repair=None))


def test_changes_of_basis_are_not_repaired_by_default():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(2)]
    options = {"example_inputs": X, "kinds": "all", "method": "weight-matching", "scaling": Scaling(steps=0)}
    assert same(ob.merge(models, data=[X], **options), ob.merge(models, data=[X], repair=None, **options))


def test_repair_by_name_needs_data():
    models = [mlp(seed) for seed in range(2)]
    with pytest.raises(ValueError, match="'rescale' measures the networks"):
        ob.merge(models, example_inputs=X, repair="rescale")
    with pytest.raises(ValueError, match="repair must be"):
        ob.merge(models, example_inputs=X, repair="rescales", data=[X])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_data_may_be_of_another_type_than_the_networks(dtype):
    models = [mlp(seed).to(dtype) for seed in range(2)]
    merged = ob.merge(models, example_inputs=X.to(dtype), data=[X], method="weight-matching")
    assert {value.dtype for value in merged.state_dict().values()} == {dtype}
    assert not same(merged, ob.merge(models, example_inputs=X.to(dtype), method="weight-matching"))


def test_batch_norms_are_not_estimated_on_single_examples():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval() for _ in range(2)]
    data, done = [X[:16], X[16:17]], []
    merged = ob.merge(models, data=data, method="weight-matching", on_repair=done.append)
    assert done == [None]
    assert same(merged, ob.merge(models, data=data, method="weight-matching", repair=None))


def test_a_seed_fixes_the_merge_of_twins_on_a_loader_that_shuffles():
    data = torch.utils.data.TensorDataset(X, torch.arange(len(X)) % 2)
    loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True, drop_last=True)
    models, found = [mlp(seed) for seed in range(2)], []
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(ob.merge(models, data=loader, kinds="positive", repair="repair", method="activation-matching"))
        assert torch.equal(torch.get_rng_state(), before)
    assert same(*found)


def test_what_twins_do_not_have_is_refused_before_the_data_are_read():
    read = []

    class Counted:
        def __iter__(self):
            for part in X.split(4):
                read.append(part)
                yield part

    with pytest.raises(ValueError, match="leave out groups= and init="):
        ob.merge([mlp(0), mlp(1)], data=Counted(), kinds="positive", repair="repair", groups=["*"])
    assert len(read) < len(X.split(4))


def test_biases_that_cannot_be_calibrated_are_refused_before_the_alignment():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval() for _ in range(2)]
    done = []
    with pytest.raises(ValueError, match="for networks without norms"):
        ob.merge(models, example_inputs=X, repair="bias", on_result=lambda *_: done.append(1))
    assert not done


def test_callbacks_do_not_change_the_merge():
    models = [mlp(seed) for seed in range(2)]
    loss = ob.Midpoint(lambda output, _: -output.square().mean())
    options = {"objective": loss, "data": [(X, None)], "kinds": "positive", "scaling": Scaling(steps=2)}
    told = ob.merge(models, on_repair=lambda _: None, on_result=lambda *_: None, **options)
    assert same(told, ob.merge(models, **options))


def test_what_repair_may_be_is_listed():
    with pytest.raises(ValueError, match=r"repair must be one of 'auto', 'repair', .* or None; got 'none'"):
        ob.merge([mlp(0), mlp(1)], example_inputs=X, repair="none")
