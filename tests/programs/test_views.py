"""What a write to one tensor means for the others that share its memory."""

import pytest
import torch

from onebasin.programs.failures import NotRecordable
from onebasin.programs.views import Views

SLICE = torch.ops.aten.slice.Tensor


def make() -> tuple[Views, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A result, a slice of it and a slice of that."""
    views = Views()
    whole, part, inner = (torch.empty(n, device="meta") for n in (8, 4, 2))
    views.add_result(whole, None, True)
    for view, of in ((part, whole), (inner, part)):
        views.add_result(view, of, True)
        views.add_part(view, SLICE, (of, 0, 0, len(view)), {})
    return views, whole, part, inner


def test_slices_are_put_back_from_the_inside():
    views, whole, part, inner = make()
    other = torch.empty(8, device="meta")
    views.add_result(other, whole, True)
    assert views.has_other_views(inner)
    assert views.is_writable(inner)
    found = [(p.part, p.whole, p.args) for p in views.write(inner)]
    assert found == [(inner, part, (0, 0, 2)), (part, whole, (0, 0, 4))]
    for current in (whole, part, inner):
        views.check_read(current)
    with pytest.raises(NotRecordable, match="written through another view"):
        views.check_read(other)


def test_parameters_and_unknown_strides_are_not_written():
    views = Views()
    parameter, view, result = torch.zeros(4), torch.empty(4, device="meta"), torch.empty(4, device="meta")
    views.add_input(parameter)
    assert not views.has_other_views(parameter)
    views.add_result(view, parameter, True)
    views.add_result(result, None, False)
    assert views.has_other_views(view)
    assert views.has_other_views(result)
    assert not views.is_writable(view)
    assert not views.is_writable(result)


def test_all_of_a_tensor_is_put_back():
    views, whole = Views(), torch.empty(8, device="meta")
    views.add_result(whole, None, True)
    same = torch.empty(8, device="meta")
    views.add_result(same, whole, True)
    views.add_part(same, torch.ops.aten.alias.default, (whole,), {})
    (found,) = views.write(same)
    assert (found.part, found.whole, found.scatter) == (same, whole, torch.ops.aten.copy.default)
    views.check_read(whole)


def test_a_constant_is_written_once_all_its_views_are_known():
    views, constant = Views(), torch.zeros(4)
    views.add_input(constant)
    assert not views.is_writable(constant)
    views.make_writable(constant)
    assert views.is_writable(constant)
