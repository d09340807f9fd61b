import torch

from onebasin.tensors.sums import add_up, inner, sum_pieces


def test_sums_do_not_depend_on_the_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    first, other = (torch.randn(3, 123_457, generator=generator) for _ in range(2))
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(add_up(sum_pieces(inner, first, other)))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    exact = float((first.double() * other.double()).sum())
    assert abs(found.pop() - exact) < 1e-2


def test_nothing_sums_to_zero():
    assert add_up([]) == 0.0
    assert add_up(sum_pieces(inner, torch.empty(0), torch.empty(0))) == 0.0
