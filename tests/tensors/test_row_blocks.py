import pytest
import torch

from onebasin.tensors import row_blocks
from onebasin.tensors.row_blocks import count_entries, cut_rows, list_blocks, name_block
from onebasin.tensors.states import LazyState, RowReader


class Recorder(RowReader):
    """Reads from memory, and notes what it was asked for."""

    def __init__(self, state):
        self.state, self.asked = state, []

    def __call__(self, key):
        self.asked.append(key)
        return self.state[key]

    def read_rows(self, key, start, stop):
        self.asked.append((key, start, stop))
        return self.state[key][start:stop]


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 3), (64, 5), (1000, 2), (3, 9000)])
def test_blocks_follow_each_other_and_are_no_larger_than_allowed(monkeypatch, shape):
    monkeypatch.setattr(row_blocks, "MAX_ENTRIES", 400)
    value = torch.empty(shape, device="meta")
    blocks = list_blocks(value)
    rows = value.shape[0] if value.dim() else 1
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == rows
    assert count_entries(value) <= max(400, value.numel() // max(rows, 1))
    assert (len(blocks) == 1) == (value.numel() <= 400)


def test_a_cut_state_reads_blocks_alone(monkeypatch):
    monkeypatch.setattr(row_blocks, "MAX_ENTRIES", 64)
    values = {"large": torch.randn(100, 2), "small": torch.randn(3)}
    reader = Recorder(values)
    state = LazyState({key: value.to("meta") for key, value in values.items()}, reader)
    cut = cut_rows(state, ["large"])
    names = [name_block("large", *rows) for rows in list_blocks(values["large"])]
    assert list(cut) == [*names, "small"]
    assert cut.shapes[names[-1]].shape == (4, 2)
    assert torch.equal(torch.cat([cut[name] for name in names]), values["large"])
    assert torch.equal(cut["small"], values["small"])
    assert reader.asked == [("large", 0, 32), ("large", 32, 64), ("large", 64, 96), ("large", 96, 100), "small"]
