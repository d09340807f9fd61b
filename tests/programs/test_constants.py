"""What a module makes while it runs, or keeps, is computed once; what may come from parameters is refused."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.programs.failures import NotRecordable
from onebasin.programs.recording import record
from tests.cases import call_of, two_layers

MADE = {
    "filled": (lambda x: torch.full((8,), 2.0).exp(), 1),
    "filled later": (lambda x: torch.empty(8).zero_(), 1),
    "shaped like another": (lambda x: x.new_zeros(8) + torch.ones_like(x).sum(), 1),
    "expanded": (lambda x: torch.arange(3.0)[:, None].expand(3, 8), 1),
    "summed over what varies": (lambda x: torch.arange(24.0).view(3, 8).sum(1, keepdim=True), 1),
    "equal by chance": (lambda x: torch.ones(8).cumsum(0).clamp(max=1.0), 0),
    "equal at the first position": (lambda x: torch.cos(0 * torch.arange(8.0)), 0),
    "numbers": (lambda x: torch.tensor([1.0] * 8), 0),
    "filled in part": (lambda x: torch.zeros(2, 8).select(0, 1).fill_(0.0), 0),
}


@pytest.mark.parametrize("name", MADE)
def test_constants_are_judged_by_how_they_are_made(name):
    """One that is the same for all units however it is called frees them; one that is so at the example pins them."""
    make, num_groups = MADE[name]
    model = two_layers(lambda self, x: self.last(self.first(x) * make(x)))
    program = record(model, call_of(torch.rand(3, 4)))
    assert len(program.given) == 2
    assert len(ob.symmetry(model, torch.rand(3, 4), verify=False).groups) == num_groups


KEPT = {
    "a table": (torch.arange(3.0)[:, None].repeat(1, 8), 1),
    "a state that is not set": (torch.zeros(3, 8), 0),
    "a table of units": (torch.arange(8.0), 0),
}


@pytest.mark.parametrize("front_end", ["recording", "export"])
@pytest.mark.parametrize("name", KEPT)
def test_constants_that_a_module_keeps(name, front_end):
    def forward(self, x):
        h = self.first(x) + self.kept
        if front_end == "export":
            other = h[:, :0]  # a recording does not follow what is written through another view
            h[:, :0].zero_()
            h = h + 0 * other.sum()
        return self.last(h)

    kept, num_groups = KEPT[name]
    model = two_layers(forward)
    model.register_buffer("kept", kept, persistent=False)
    symmetry = ob.symmetry(model, torch.rand(3, 4), verify=False)
    assert [f.name for f in symmetry.front_ends] == [front_end]
    assert len(symmetry.groups) == num_groups


def test_what_is_made_in_the_shape_of_a_result_is_a_constant():
    """And may be written through views: so masks are made."""

    def forward(self, x):
        h = self.first(x)
        mask = h.new_zeros(8)
        mask[:4] = 1.0
        return self.last(h * mask + torch.zeros_like(h))

    program = record(two_layers(forward), call_of(torch.rand(3, 4)))
    assert [tuple(value.shape) for value in program.given.values()] == [(3, 4), (8,), (3, 8)]
    assert not ob.symmetry(two_layers(forward), torch.rand(3, 4)).groups


def test_values_of_constants_may_be_read():
    def forward(self, x):
        steps = torch.arange(3)
        return self.last(self.first(x)) * (2.0 if steps.max().item() == 2 else 1.0)

    record(two_layers(forward), call_of(torch.rand(3, 4)))


def test_a_constant_that_was_read_is_still_a_constant():
    def forward(self, x):
        positions = torch.arange(8.0)
        h = self.first(x) + positions
        assert positions.sum().item() == 28
        return self.last(h)

    record(two_layers(forward), call_of(torch.rand(3, 4)))


def test_constants_have_names():
    def forward(self, x):
        return self.last(self.first(x) * self.scales + torch.arange(8.0))

    model = two_layers(forward)
    model.register_buffer("scales", torch.arange(8.0), persistent=False)
    program = record(model, call_of(torch.rand(3, 4)))
    assert [name for kind, name in program.inputs.values() if kind.name == "CONSTANT_TENSOR"] == [
        "scales",
        "made for the model",
    ]
    assert "scales" in {pin.operation for pin in ob.symmetry(model, torch.rand(3, 4)).pinned.values()}


def test_sparse_tensors_are_refused():
    sparse = torch.eye(8).to_sparse()
    for forward in (
        lambda self, x: self.last(self.first(x) @ sparse),
        lambda self, x: self.last(self.first(x) @ torch.eye(8).to_sparse()),
    ):
        with pytest.raises(NotRecordable, match="layout"):
            record(two_layers(forward), call_of(torch.rand(3, 4)))
    with pytest.raises(NotRecordable, match=r"kept.*layout"):
        record(two_layers(lambda self, x: x, kept=nn.Parameter(sparse)), call_of(torch.rand(3, 4)))
