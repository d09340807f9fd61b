"""The coverage table: what its oracle sees, rows that die or hang, runs that go on where they were."""

import os
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from benchmarks.architectures.architecture import Architecture, Example, NotMade, images
from benchmarks.architectures.small_models import small_architectures
from benchmarks.coverage import Book, is_bad, run
from benchmarks.coverage_oracle import calls_to_check, check
from benchmarks.coverage_tables import markdown, row, summary
from benchmarks.isolated_processes import run_isolated
from benchmarks.measuring import find_commit

SMALL = {a.name: a for a in small_architectures()}


def fail():
    raise NotMade("needs a download")


def die():
    os._exit(3)


@pytest.fixture(scope="module")
def records():
    chosen = [SMALL[name] for name in ("MLP", "ResNet, group norm", "GRU cell")]
    chosen += [Architecture("torch", f.__name__, f) for f in (fail, die)]
    return {r["name"]: r for r in run(chosen, jobs=2, seconds=120)}


def test_rows(records):
    assert {name: r["verdict"] for name, r in records.items()} == {
        "MLP": "right",
        "ResNet, group norm": "right",
        "GRU cell": "right",
        "fail": "not made",
        "die": "not finished",
    }
    assert "died, making it" in records["die"]["why"]
    assert records["ResNet, group norm"]["checked"] == ["values", "batch", "length", "length"]
    assert records["MLP"]["free"] == records["MLP"]["hidden"] == 24
    assert not any(map(is_bad, records.values()))
    assert records["MLP"]["all"]["scales"] == 1
    assert records["MLP"]["all"]["verdict"] == "right"


def test_a_process_that_hangs_is_ended():
    def work(seconds, report):
        report({"began": True})
        time.sleep(seconds)

    found = {item: (record, failure) for item, record, failure in run_isolated([0, 60, -1], work, jobs=3, seconds=2)}
    assert found == {
        0: ({"began": True}, ""),
        60: ({"began": True}, "not done in 2 s"),
        -1: ({"began": True}, "ValueError: sleep length must be non-negative"),
    }


def test_pages(records):
    page = markdown(list(records.values()), "make coverage", "a machine", ["LSTM"])
    assert "None of 4 architectures was found wrong: 3 right, 1 not finished." in summary(list(records.values()))
    assert "ended before these 1:\n\nLSTM." in page
    assert "| GRU cell |" in page
    assert "| fail |" not in page
    assert all(len(row(r)) == len(row(records["MLP"])) for r in records.values())


def test_a_wrong_one_is_counted_first(records):
    assert "1 of 1 architectures was found wrong" in summary([{**records["MLP"], "verdict": "WRONG"}])


def test_wrong_scales_and_bases_are_counted_too(records):
    wrong = {**records["MLP"], "single": {"verdict": "right", "all": {"verdict": "WRONG"}}}
    assert is_bad(wrong)
    assert "1 of 1 architectures was found wrong" in summary([wrong])


def test_a_run_goes_on_where_it_was(records, tmp_path):
    Book(tmp_path, "code").add(records["MLP"])
    book = Book(tmp_path, "code")
    assert book.has(SMALL["MLP"])
    assert not book.has(SMALL["GRU cell"])
    assert not Book(tmp_path, "other code").has(SMALL["MLP"])
    assert [row["commit"] for row in book.records] == [find_commit()] * len(book.records)
    book.keep([SMALL["GRU cell"]])
    assert book.records == []


class Shortcut(nn.Module):
    """Right at length one alone: positions weigh the units."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        weights = torch.arange(8.0) * (x.shape[1] - 1)
        return self.leave(self.enter(x) * (1 + weights)).masked_fill(x[..., :1] > 5, torch.finfo(torch.float32).min)


CLAIM = ob.Symmetry.from_axes(
    {"enter.weight": "h 3", "enter.bias": "h", "leave.weight": "2 h"}, free=["h"], model=Shortcut()
)


@pytest.mark.parametrize(("length", "expected"), [(1, "right"), (4, "wrong")])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_oracle_sees_other_lengths(length, expected):
    x = torch.randn(2, length, 3)
    x[0, 0, 0] = 6.0  # so that one output is the least number of its type
    found = check(CLAIM, Shortcut(), x)
    assert found["verdict"] == expected
    assert found.get("guilty", ["h"]) == ["h"]


@pytest.mark.parametrize(("kind", "expected"), [("orthogonal", "right"), ("linear", "wrong")])
def test_the_oracle_sees_bases_that_are_too_free(kind, expected):
    model = nn.Sequential(nn.Linear(3, 8), nn.RMSNorm(8), nn.Linear(8, 2)).eval()
    found = ob.symmetry(model, torch.randn(4, 3), kinds="all")
    (basis,) = found.bases.values()
    claimed = replace(found, bases={basis.name: replace(basis, kind=kind)})
    assert check(claimed, model, torch.randn(4, 3))["verdict"] == expected


def test_the_oracle_says_what_a_module_refuses():
    assert check(CLAIM, Shortcut(), torch.randn(2, 1, 4))["verdict"] == "refused"


def test_calls_differ_in_one_thing_after_the_other():
    example = Example(nn.Identity(), images(), 8, (9,))
    shapes = [(where, tuple(x.shape)) for where, x in calls_to_check(example.inputs, example.length, example.others, 2)]
    assert shapes == [("values", (2, 3, 8, 8)), ("batch", (3, 3, 8, 8)), ("length", (3, 3, 9, 9))]
