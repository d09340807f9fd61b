"""Sizes and branches that follow from integer inputs alone are known; others are refused."""

import pytest
import torch

import onebasin as ob
from onebasin.programs.failures import NeedsValues, NotRecordable, ReadsValues
from onebasin.programs.recording import record
from tests.cases import call_of, two_layers

EDGES = torch.tensor([[0, 1, 2, 3, 3, 4, 4, 0], [1, 2, 2, 0, 4, 4, 1, 3]])


def make_graph(num_nodes=5):
    return torch.randn(num_nodes, 4), EDGES


def drop_loops(edges):
    return edges[:, edges[0] != edges[1]]


def add_remaining_loops(edges, num_nodes):
    loops = torch.arange(num_nodes, device=edges.device).repeat(2, 1)
    return torch.cat([drop_loops(edges), loops], dim=1)


def convolve(self, x, edges):
    """A graph convolution, normalised by degrees, that replaces loops."""
    source, target = add_remaining_loops(edges, x.shape[0])
    ones = torch.ones(source.shape[0])
    degree = x.new_zeros(x.shape[0]).scatter_add_(0, target, ones).pow_(-0.5)
    messages = self.first(x)[source] * (degree[source] * degree[target])[:, None]
    h = messages.new_zeros(x.shape[0], 8).index_add_(0, target, messages)
    return self.last(h.relu())


def count_nodes(self, x, edges):
    num_nodes = int(edges.max()) + 1
    h = self.first(x)
    return self.last(torch.zeros(num_nodes, 8).index_add(0, edges[1], h[edges[0]]).relu())


def select_rows(self, x, edges):
    h = self.first(x)
    return self.last(h[torch.bincount(edges[0], minlength=5)[:5] > 1])


def find_rows(self, x, edges):
    rows = (edges[0] == edges[1]).nonzero().view(-1)
    return self.last(self.first(x)[edges[0][rows]])


def branch_on_a_sum(self, x, edges):
    h = self.first(x)
    return self.last(h * 2 if (edges[0] == edges[1]).sum().item() > 1 else h)


@pytest.mark.parametrize(
    "forward", [convolve, count_nodes, select_rows, find_rows, branch_on_a_sum], ids=lambda f: f.__name__
)
def test_what_follows_from_integers_is_traced_and_reported(forward):
    model, inputs = two_layers(forward), make_graph()
    symmetry = ob.symmetry(model, inputs)
    assert [group.size for group in symmetry.groups.values()] == [8]
    assert symmetry.front_ends[0].name == "recording"
    assert "values of integer inputs (test_integer_values.py:" in symmetry.limits[0]
    other = torch.randn(5, 4), EDGES.flip(1).roll(1, 1)
    assert symmetry.verify(model, [inputs, other]) < 1e-9


def test_a_program_at_other_integers_is_added():
    """The example takes the branch with more symmetry, drawn inputs the other one."""

    def forward(self, x, edges):
        h = self.first(x)
        return self.last(h * torch.arange(8.0) if (edges[0] == edges[1]).any() else h)

    without = drop_loops(EDGES)
    symmetry = ob.symmetry(two_layers(forward), (torch.randn(5, 4), without), verify=False)
    assert not symmetry.groups


def test_the_units_that_a_mask_selects_from_are_fixed():
    def forward(self, x, mask):
        return self.last(self.first(x)) + self.first(x)[:, mask].sum(1, keepdim=True)

    inputs = torch.randn(3, 4), torch.tensor([True, False] * 4)
    assert not ob.symmetry(two_layers(forward), inputs, verify=False).groups


def test_a_mask_that_is_constant_limits_nothing():
    symmetry = ob.symmetry(two_layers(lambda self, x: self.last(self.first(x))[:, torch.arange(2) > 0]), torch.randn(3, 4))
    assert [group.size for group in symmetry.groups.values()] == [8]
    assert not symmetry.limits


def test_a_mask_of_several_axes_leaves_the_others_free():
    model = two_layers(lambda self, x, mask: self.last(self.first(x)[mask].sum(0).relu()))
    inputs = torch.randn(2, 3, 4), torch.tensor([[True, False, True], [True, True, False]])
    symmetry = ob.symmetry(model, inputs)
    assert [group.size for group in symmetry.groups.values()] == [8]


def read_a_parameter(self, x, edges):
    return self.last(self.first(x)[:, self.first.bias > 0])


def read_a_float(self, x, edges):
    return self.last(self.first(x)[x[:, 0] > 0])


def read_integers_made_from_floats(self, x, edges):
    return self.last(self.first(x)[: int(x.long().max() + edges.max())])


@pytest.mark.parametrize("forward", [read_a_parameter, read_a_float, read_integers_made_from_floats])
def test_what_follows_from_other_values_is_refused(forward):
    with pytest.raises((NeedsValues, ReadsValues)):
        record(two_layers(forward), call_of(make_graph()))
    with pytest.raises(ValueError, match=r"depends on values of tensors \(test_integer_values.py:"):
        ob.symmetry(two_layers(forward), make_graph())


def test_a_module_that_takes_no_other_integers_is_refused():
    def forward(self, x, edges):
        if int(edges.sum()) != int(EDGES.sum()):
            raise RuntimeError("unknown edges")
        return self.last(self.first(x))

    with pytest.raises(ValueError, match=r"values of integer inputs \(test_integer_values.py:.*it fails at others"):
        ob.symmetry(two_layers(forward), make_graph())


def test_a_view_of_a_constant_that_is_written_is_not_a_constant():
    def forward(self, x, edges):
        sums = torch.zeros(5, 8)
        view = sums[:2]
        sums.index_add_(0, edges[1], self.first(x)[edges[0]])
        return self.last(view + 1)

    with pytest.raises(NotRecordable, match="other views"):
        record(two_layers(forward), call_of(make_graph()))


def test_on_the_meta_device_no_values_are_known():
    inputs = tuple(tensor.to("meta") for tensor in make_graph())
    with pytest.raises(NeedsValues):
        record(two_layers(convolve).to("meta"), call_of(inputs))
