import torch

from onebasin.tracing.precision import compute_in_float64


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
