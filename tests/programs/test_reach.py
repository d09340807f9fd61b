import torch
from torch import nn

from onebasin.programs.reach import ReachRecorder
from onebasin.torch_internals import memory_id


def test_a_lookup_reads_rows_and_a_product_reads_all():
    table, weight = torch.randn(6, 3), torch.randn(2, 3)
    ids = torch.tensor([[1, 4]])
    recorder = ReachRecorder({"table": table, "weight": weight, "other": torch.randn(2)}, (ids,))
    with recorder:
        nn.functional.linear(nn.functional.embedding(ids.view(-1), table), weight)
    assert recorder.reached("table").all(1).tolist() == [False, True, False, False, True, False]
    assert recorder.reached("weight").all()
    assert not recorder.reached("other").any()
    assert recorder.num_rows == {"table": 6}
    assert recorder.num_looked_up("table") == 2
    assert recorder.ranges == {memory_id(ids): 6}


def test_all_ways_to_take_rows():
    ids = torch.tensor([0, 2])
    for take in (lambda t: t[ids], lambda t: t.index_select(0, ids), lambda t: nn.functional.embedding_bag(ids[None], t)):
        table = torch.randn(4, 3)
        recorder = ReachRecorder({"table": table}, (ids,))
        with recorder:
            take(table)
        assert recorder.reached("table").any(1).tolist() == [True, False, True, False]
        assert recorder.ranges == {memory_id(ids): 4}


def test_views_are_followed():
    weight = torch.randn(4, 3)
    recorder = ReachRecorder({"weight": weight, "alias": weight})
    with recorder:
        weight.t()[:2]
        assert not recorder.reached("weight").any()
        _ = weight[1:3].expand(5, 2, 3) + 1
    assert recorder.reached("alias").all(1).tolist() == [False, True, True, False]


def test_an_operation_without_entries_reads_nothing():
    experts = torch.randn(2, 3, 3)
    recorder = ReachRecorder({"experts": experts})
    with recorder:
        for rows, expert in zip((torch.randn(4, 3), torch.randn(0, 3)), experts, strict=True):
            _ = rows @ expert
    assert recorder.reached("experts").all(2).all(1).tolist() == [True, False]


def test_computed_indices_are_told_from_given_ones():
    table, ids = torch.randn(9, 2), torch.tensor([3])
    recorder = ReachRecorder({"table": table}, (ids,))
    with recorder:
        nn.functional.embedding(torch.arange(5), table)
    assert recorder.others == {(5, 9)}
    assert not recorder.ranges
