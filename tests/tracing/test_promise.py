"""What a symmetry promises holds in train mode and at other sizes too, or it is pinned, or a warning says so."""

import copy
import warnings

import pytest
import torch
from torch import nn

import onebasin as ob
from tests.cases import Fn, two_layers, weight


class Auxiliary(nn.Module):
    """Like GoogLeNet: a second head, with a norm and dropout, that is used in train mode only."""

    def __init__(self, dropout: float = 0.5):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Linear(6, 2)
        self.auxiliary = nn.Sequential(
            nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(8 * 16, 2)
        )

    def forward(self, x):
        h = self.stem(x)
        result = self.head(h.mean((2, 3)))
        return (result, self.auxiliary(h)) if self.training else result


def measure_in_train_mode(model, symmetry, inputs):
    """The largest change of the outputs that a permutation makes."""
    one = copy.deepcopy(model).double().train()
    other = copy.deepcopy(one)
    other.load_state_dict(symmetry.random(torch.Generator().manual_seed(0)).apply(one))
    with torch.no_grad():
        return max(float((a - b).abs().max()) for a, b in zip(one(inputs), other(inputs), strict=True))


@pytest.mark.parametrize("batch", [1, 3])
def test_parameters_that_are_used_in_train_mode_move_along(batch):
    model = Auxiliary(dropout=0.0).eval()
    symmetry = ob.symmetry(model, torch.rand(batch, 3, 8, 8))
    assert not symmetry.unreached
    assert sorted(group.size for group in symmetry.groups.values()) == [6, 8]
    assert measure_in_train_mode(model, symmetry, torch.rand(4, 3, 8, 8, dtype=torch.float64)) < 1e-12
    layout = symmetry.layouts["auxiliary.1.running_mean"]
    assert layout == symmetry.layouts["auxiliary.0.bias"]


def test_train_mode_on_the_meta_device():
    with torch.device("meta"):
        model = Auxiliary()
    found, expected = (ob.symmetry(m, torch.rand(2, 3, 8, 8, device=m.head.weight.device)) for m in (model, Auxiliary()))
    assert found.groups == expected.groups


def test_dropout_in_train_mode_pins_nothing():
    assert len(ob.symmetry(Auxiliary(), torch.rand(2, 3, 8, 8)).groups) == 2


def test_train_mode_changes_nothing():
    model = Auxiliary().train()
    model.stem[1].eval()
    before = copy.deepcopy(model.state_dict())
    ob.symmetry(model, torch.rand(2, 3, 8, 8))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.training
    assert not model.stem[1].training


def test_what_train_mode_forbids_is_pinned():
    def forward(self, x):
        h = self.first(x)
        return (self.last(h), h * self.scale) if self.training else self.last(h)

    symmetry = ob.symmetry(two_layers(forward, scale=weight(8)), torch.rand(3, 4))
    assert not symmetry.groups
    assert "model output" in str(symmetry.pinned["first.weight", 0])


def test_sites_are_those_of_eval_mode():
    symmetry = ob.symmetry(Auxiliary(), torch.rand(2, 3, 8, 8))
    assert {site.module for sites in symmetry.sites.values() for site in sites} == {"stem.0", "stem.1", "stem.2"}


def test_frozen_parts_stay_frozen_in_train_mode():
    """A module may keep its norms in eval mode by overriding train()."""

    class Frozen(Auxiliary):
        def train(self, mode=True):
            super().train(mode)
            self.stem.eval()
            return self

    model = Frozen(dropout=0.0)
    symmetry = ob.symmetry(model, torch.rand(2, 3, 8, 8))
    assert measure_in_train_mode(model, symmetry, torch.rand(4, 3, 8, 8, dtype=torch.float64)) < 1e-12


def test_parameters_that_nothing_uses_are_warned_of():
    model = two_layers(lambda self, x: self.last(self.first(x)), spare=nn.Linear(8, 3), other=weight(8))
    message = r"parameters that no call used \(other and 1 more\) may read or write free units"
    with pytest.warns(ob.UnreachedWarning, match=message) as caught:
        symmetry = ob.symmetry(model, torch.rand(3, 4))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert symmetry.unreached == ("other", "spare.weight", "spare.bias")
    with pytest.warns(ob.UnreachedWarning, match=message) as caught:
        symmetry.random().apply(model)
    assert caught[0].filename == __file__
    symmetry.identity().apply(model)


def test_parameters_that_cannot_hold_a_group_are_not_warned_of():
    model = two_layers(lambda self, x: self.last(self.first(x)), spare=weight(7), number=weight())
    symmetry = ob.symmetry(model, torch.rand(3, 4))
    assert symmetry.unreached == ("spare", "number")
    symmetry.random().apply(model)
    fixed = two_layers(lambda self, x: (self.last(h := self.first(x)), h), spare=weight(8))
    assert not ob.symmetry(fixed, torch.rand(3, 4)).groups


def test_calls_that_use_all_parameters_are_not_warned_of():
    model = two_layers(lambda self, x, twice=False: self.last(self.first(x) * (self.spare if twice else 1)), spare=weight(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        symmetry = ob.symmetry(model, [torch.rand(3, 4), {"x": torch.rand(3, 4), "twice": True}])
    assert symmetry.layouts["spare"] == symmetry.layouts["first.bias"]


def slice_positions(self, x):
    return self.last(self.first(x) + self.positions[: x.shape[1]])


def one_sample_is_special(self, x):
    h = self.first(x)
    return self.last(h if len(x) == 1 else h * torch.arange(8.0))


def several_samples_are_special(self, x):
    h = self.first(x)
    return self.last(h * torch.arange(8.0) if len(x) == 1 else h)


def short_sequences_are_special(self, x):
    h = self.first(x)
    return self.last(h if x.shape[1] < 4 else h * torch.arange(8.0))


def decay_by_position(self, x):
    """At one position all constants are the same."""
    positions = torch.arange(x.shape[1])[:, None] * torch.arange(8.0)
    return self.last(self.first(x) * torch.exp(-positions))


def large_images_are_special(self, x):
    h = self.first(x.movedim(1, -1))
    return self.last(h if x.shape[2] < 9 else h * torch.arange(8.0))


def odd_images_are_special(self, x):
    h = self.first(x.movedim(1, -1))
    return self.last(h if x.shape[3] % 2 == 0 else h * torch.arange(8.0))


def long_waveforms_are_special(self, x):
    h = self.first(x.unfold(1, 4, 2))
    return self.last(h if x.shape[1] < 11 else h * torch.arange(8.0))


def lengths_are_last(self, x):
    h = self.first(x.mT)
    return self.last(h if x.shape[2] < 6 else h * torch.arange(8.0))


# The example's shape, and the sizes of the groups that hold at every size.
OTHER_SIZES = {
    slice_positions: ((2, 5, 4), [8]),
    one_sample_is_special: ((1, 4), []),
    several_samples_are_special: ((2, 4), []),
    short_sequences_are_special: ((2, 3, 4), []),
    decay_by_position: ((2, 1, 4), []),
    large_images_are_special: ((2, 4, 8, 8), []),
    odd_images_are_special: ((2, 4, 8, 8), []),
    long_waveforms_are_special: ((2, 10), []),
    lengths_are_last: ((2, 4, 5), []),
}


@pytest.mark.parametrize("forward", OTHER_SIZES, ids=lambda f: f.__name__)
def test_groups_hold_at_other_sizes(forward):
    shape, sizes = OTHER_SIZES[forward]
    model = two_layers(forward, positions=weight(16, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ob.UnreachedWarning)
        symmetry = ob.symmetry(model, torch.rand(shape))
        assert [group.size for group in symmetry.groups.values()] == sizes
        if sizes:
            assert symmetry.verify(model, torch.rand(shape[0] + 2, shape[1] + 4, *shape[2:])) < 1e-9
        assert symmetry.verify(model, torch.rand(shape)[:1]) < 1e-9
        assert ob.symmetry(model, torch.rand(shape), verify=False).groups == symmetry.groups


def test_units_are_counted_again_when_groups_are_pinned():
    symmetry = ob.symmetry(two_layers(one_sample_is_special), torch.rand(1, 4))
    assert symmetry.num_free == 0
    assert not symmetry.sites


def test_modules_that_take_no_other_size_are_left_alone():
    model = Fn(lambda self, x: self.last(self.first(x).view(2, 8)), first=nn.Linear(4, 8), last=nn.Linear(8, 2))
    assert len(ob.symmetry(model, torch.rand(2, 4)).groups) == 1


def test_parameters_that_are_also_kept_elsewhere():
    """They cannot be replaced for a run of the module, which says nothing then."""
    model = two_layers(lambda self, x: self.last(x @ self.kept[0].t() + self.first.bias))
    model.kept = [model.first.weight]
    assert len(ob.symmetry(model, torch.rand(3, 4)).groups) == 1


def train_mode_is_special(self, x):
    h = self.first(x)
    return self.last(h * torch.arange(8.0) if self.training else h)


def test_branches_of_train_mode_are_found():
    symmetry = ob.symmetry(two_layers(train_mode_is_special), torch.rand(3, 4))
    assert not symmetry.groups
    assert not symmetry.limits


def test_noise_of_train_mode_is_reported():
    def forward(self, x):
        h = self.first(x)
        return self.last(h + torch.rand_like(h) if self.training else h)

    model = two_layers(forward)
    symmetry = ob.symmetry(model, torch.rand(3, 4))
    assert len(symmetry.groups) == 1
    assert symmetry.limits == ("train mode draws random numbers of its own, and was not traced",)


def test_one_token_says_as_much_as_many():
    """Tokens that are all the same, as an example of one token is, hide how positions are told apart."""

    def forward(self, ids):
        h = self.first(self.embedding(ids))
        turned = h * torch.cos(torch.arange(ids.shape[1])[:, None] * torch.arange(8.0))
        return self.last(torch.softmax(turned @ turned.mT, -1) @ h)

    model = two_layers(forward, embedding=nn.Embedding(20, 4))
    symmetry = ob.symmetry(model, torch.zeros(1, 1).long())
    assert not [group for group in symmetry.groups.values() if group.size == 8]
    assert symmetry.verify(model, torch.randint(20, (2, 9))) < 1e-9


def test_optional_arguments_that_were_not_given_are_told():
    model = two_layers(lambda self, x, mask=None: self.last(self.first(x).cumsum(1) if mask is not None else self.first(x)))

    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, mask=None, scale=1.0):
            return self.inner(x, mask) * scale

    assert ob.symmetry(Optional(), torch.rand(3, 4)).limits == ("calls that give mask, scale were not traced",)
    calls = [(torch.rand(3, 4),), (torch.rand(3, 4), torch.ones(3), 2.0)]
    symmetry = ob.symmetry(Optional(), calls)
    assert not symmetry.limits
    assert not symmetry.groups


def test_sizes_that_could_not_be_traced_are_told():
    def forward(self, x):
        assert x.shape == (3, 4), "three samples"
        return self.last(self.first(x))

    (limit,) = ob.symmetry(two_layers(forward), torch.rand(3, 4)).limits
    assert limit.startswith("no other batch size, length or image size could be traced")


def test_a_warning_points_at_the_line_of_the_user_also_from_a_file(tmp_path):
    model = two_layers(lambda self, x: self.last(self.first(x)), other=nn.Linear(8, 8))
    with pytest.warns(ob.UnreachedWarning) as seen:
        symmetry = ob.symmetry(model, torch.rand(3, 4))
    assert seen[0].filename == __file__
    symmetry.random().save(tmp_path / "p.safetensors")
    with pytest.warns(ob.UnreachedWarning) as seen:
        ob.Permutation.load(tmp_path / "p.safetensors").apply(model)
    assert seen[0].filename == __file__
