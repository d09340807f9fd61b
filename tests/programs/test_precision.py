import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from onebasin.programs.precision import compute_in_float64
from onebasin.torch_internals import GROUPED_MM, TorchDispatchMode, below_autograd
from tests.cases import Fn


def test_a_view_of_other_strides_than_were_recorded_is_copied():
    """Attention on a GPU returns other strides in float64 than in the type it was recorded in."""
    transposed = torch.arange(6.0).view(2, 3).t()
    found = compute_in_float64(torch.ops.aten.view.default, (transposed, [6]), {})
    assert found.tolist() == [0, 3, 1, 4, 2, 5]
    assert found.dtype == torch.float64


def test_types_that_an_operation_names_are_promoted():
    found = compute_in_float64(torch.ops.aten.zeros.default, ([2],), {"dtype": torch.float16})
    assert found.dtype == torch.float64
    assert compute_in_float64(torch.ops.aten.arange.default, (3,), {}).dtype == torch.int64


@pytest.mark.filterwarnings("ignore::onebasin.UnreachedWarning")  # the norm's own weight
def test_statistics_of_the_user_are_not_updated():
    """In training mode a norm writes them, and in float64 nothing is copied by a cast."""

    def forward(self, x):
        return self.last(F.batch_norm(self.first(x), self.norm.running_mean, self.norm.running_var, training=True))

    model = Fn(forward, first=nn.Linear(4, 8), norm=nn.BatchNorm1d(8), last=nn.Linear(8, 2)).double()
    inputs = torch.rand(3, 4, dtype=torch.float64)
    ob.symmetry(model, inputs).verify(model, inputs)
    assert model.norm.running_mean.eq(0).all()
    assert model.norm.running_var.eq(1).all()


def test_generators_draw_the_same_numbers_and_are_not_used_up():
    generator = torch.Generator().manual_seed(1)
    first, second = (compute_in_float64(torch.ops.aten.rand.generator, ([4],), {"generator": generator}) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(1).get_state())


def test_rows_are_multiplied_by_the_matrix_of_their_group():
    rows, weights = torch.rand(7, 4), torch.rand(3, 4, 8)
    found = compute_in_float64(GROUPED_MM, (rows, weights, torch.tensor([2, 2, 6], dtype=torch.int32)), {})
    expected = torch.cat([rows[:2].double() @ weights[0].double(), rows[2:6].double() @ weights[2].double()])
    assert torch.equal(found[:6], expected)


@pytest.mark.parametrize(
    ("size", "kernel", "options"),
    [
        ((5, 7), (3, 3), {}),
        ((6, 9), (5, 3), {"stride": (2, 3), "padding": (2, 1), "dilation": (1, 2)}),
        ((2, 2), (5, 5), {"stride": 2, "padding": 2, "bias": None}),
        ((40, 40), (3, 3), {"padding": 1}),  # a large map
    ],
)
def test_depthwise_convolutions(size, kernel, options):
    inputs, weight, bias = torch.randn(2, 6, *size).double(), torch.randn(6, 1, *kernel).double(), torch.randn(6).double()
    options = {"bias": bias, **options}
    seen = []

    class Computed(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    with below_autograd(), Computed():
        expected = F.conv2d(inputs, weight, groups=6, **options)
    ((operation, args),) = seen
    found = compute_in_float64(operation, args, {})
    assert found.is_contiguous()
    assert torch.allclose(found, expected, atol=1e-12)
