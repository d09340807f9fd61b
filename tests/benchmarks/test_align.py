"""The benchmark of alignment: its reference solver, its jobs, its tables."""

import argparse
import copy
import sys

import pytest
import torch
from torch import nn

import onebasin as ob
from benchmarks.align import list_jobs
from benchmarks.align_tables import (
    draw_devices,
    load_records,
    print_comparison,
    print_details,
    print_devices,
    print_pairs,
    print_tables,
)
from benchmarks.plain_matching import match_plainly
from benchmarks.solvers import COPY_SOLVERS, PAIR_SOLVERS, Task, judge, run


def make_copy():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 9, 3), nn.Flatten(), nn.Linear(9 * 4, 3)]
    model, inputs = nn.Sequential(*layers), torch.randn(1, 2, 6, 6)
    symmetry = ob.symmetry(model, inputs)
    twin = copy.deepcopy(model)
    planted = symmetry.random(torch.Generator().manual_seed(1))
    twin.load_state_dict(planted.apply(model))
    return Task(twin, model, inputs), symmetry, planted


def test_plain_matching_finds_a_copy_and_sweeps_to_the_same_rest():
    task, symmetry, planted = make_copy()
    states = [dict(model.state_dict()) for model in (task.to, task.model)]
    assert match_plainly(*states, symmetry) == planted.inverse()
    other = {key: torch.randn_like(value) for key, value in states[1].items()}
    found = match_plainly(states[0], other, symmetry)

    def inner(permutation):
        return sum(float((value * states[0][key]).sum()) for key, value in permutation.apply(other).items())

    rest = ob.align(other, to=states[0], symmetry=symmetry, method="weight-matching", init=found)
    assert inner(rest.permutation) == pytest.approx(inner(found), rel=1e-6)  # no sweep of ours gets any further


@pytest.mark.parametrize("solver", [name for name in COPY_SOLVERS if name.startswith(("ours", "plain"))])
def test_solvers_find_a_copy_and_say_what_it_cost(solver):
    task, _, _ = make_copy()
    record, answer = run(task, COPY_SOLVERS[solver], "cpu")
    assert judge(task, answer.state) == {"exact": True}
    assert record["seconds"] >= record["tracing"] + record["solving"] > 0


def test_every_solver_has_its_process_unless_they_share_one():
    options = argparse.Namespace(networks=["mlp"], pairs=["P"], solvers=None, authors="there", rebasin=None, shared=False)
    jobs = list(list_jobs(options, known={("copy", "mlp", "ours, default")}))
    assert all(len(solvers) == 1 for _, _, solvers, _ in jobs)
    copies = [solvers[0] for task, _, solvers, _ in jobs if task == "copy"]
    assert sorted(copies) == sorted(set(COPY_SOLVERS) - {"ours, default", "rebasin"})
    options.shared = True
    shared = list(list_jobs(options, known=set()))
    assert [(task, peer) for task, _, _, peer in shared] == [
        ("copy", sys.executable), ("copy", "there"), ("pair", sys.executable), ("pair", "there"),
    ]  # fmt: skip
    assert sum(len(solvers) for _, _, solvers, _ in shared) == len(COPY_SOLVERS) + len(PAIR_SOLVERS) - 2


def test_ratios_are_to_the_same_kind_of_method(capsys):
    base = {"task": "copy", "network": "mlp", "tracing": 0.5, "assigning": None, "bytes": 2**20, "exact": True}
    print_tables([
        {**base, "solver": "ours, default", "seconds": 1.0, "cpu_seconds": 1.0, "solving": 0.5, "steps": 1},
        {**base, "solver": "ours, descent alone", "seconds": 2.5, "cpu_seconds": 2.5, "solving": 2.0, "steps": 4},
        {**base, "solver": "authors", "seconds": 12.0, "cpu_seconds": 24.0, "solving": 10.0, "steps": 5, "exact": False},
        {**base, "solver": "rebasin", "failed": "TimeoutError: no | luck"},
    ])  # fmt: skip
    rows = {
        line.split(" | ")[1]: [c.strip() for c in line.strip("| ").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if " | " in line
    }
    assert rows["authors"][-4:] == ["12.0", "24.0", "4.0", "1.0"]
    assert rows["authors"][-5] == "no"
    assert rows["rebasin"][2] == "no / luck"


def test_a_descent_is_compared_with_a_descent(capsys):
    base = {"task": "copy", "device": "cpu", "bytes": 2**20, "exact": True, "commit": "abc"}
    records = [
        {**base, "network": "mlp", "solver": "ours, default", "cpu_seconds": 1.0, "first_seconds": 1.5},
        {**base, "network": "mlp", "solver": "ours, descent alone", "cpu_seconds": 8.0, "first_seconds": 9.0},
        {**base, "network": "mlp", "solver": "ours, descent by entries", "cpu_seconds": 2.0, "first_seconds": 3.0},
        {**base, "network": "mlp", "solver": "authors", "cpu_seconds": 4.0, "exact": False},
        {**base, "network": "vgg", "solver": "authors", "failed": "TimeoutError: no | luck"},
    ]  # fmt: skip
    print_comparison(records)
    header, _, *rows = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.strip().splitlines())
    assert "copy detection" in header[2]
    assert rows[0] == ["MLP 2 x 512", "not exact, 4", "1", "4", "8", "0.5", "2", "2"]
    assert rows[1][:3] == ["vgg", "no / luck", "not run"]
    print_details(records)
    _, _, *rows = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.strip().splitlines())
    assert rows[0] == [
        "MLP 2 x 512", "1 s, first run 1.5 s, 1 MiB (abc)", "8 s, first run 9 s, 1 MiB (abc)",
        "2 s, first run 3 s, 1 MiB (abc)", "not exact, 4 s, first run not recorded, 1 MiB (abc)",
    ]  # fmt: skip


def test_devices_stand_side_by_side(capsys, tmp_path):
    base = {"task": "copy", "network": "mlp", "bytes": 2**20, "exact": True}
    on_cpu = [
        {**base, "device": "cpu", "solver": "ours, default", "cpu_seconds": 1.0},
        {**base, "device": "cpu", "solver": "authors", "cpu_seconds": 4.0},
    ]
    on_gpu = [
        {**base, "device": "cuda", "solver": "ours, default", "seconds": 0.5, "cpu_seconds": 9.0, "first_seconds": 2.5},
        {**base, "device": "cuda", "solver": "ours, descent alone", "seconds": 0.6, "cpu_seconds": 9.0},
        {**base, "device": "cuda", "solver": "authors", "seconds": 3.0, "cpu_seconds": 1.0},
    ]
    print_devices(on_cpu, on_gpu)
    header, _, row = (line[2:-2].split(" | ") for line in capsys.readouterr().out.strip().splitlines())
    assert [cell[:4] for cell in header].count("GPU:") == 1
    assert row == ["MLP 2 x 512", "4", "1", "4", "not run", "", "3", "0.5 (2.5)", "6", "0.6", "5"]
    draw_devices(on_cpu, on_gpu, tmp_path / "copies.svg")
    assert (tmp_path / "copies.svg").stat().st_size > 1000


def test_a_ratio_says_if_its_records_are_of_two_runs_and_is_left_out_for_other_threads(capsys):
    base = {"task": "copy", "network": "mlp", "device": "cuda", "exact": True, "threads": 16, "commit": "abc"}
    print_comparison([
        {**base, "solver": "ours, default", "seconds": 0.5, "threads": 4},
        {**base, "solver": "ours, descent alone", "seconds": 1.0, "commit": "def"},
        {**base, "solver": "ours, descent by entries", "seconds": 2.0},
        {**base, "solver": "authors", "seconds": 4.0},
    ])  # fmt: skip
    row = capsys.readouterr().out.strip().splitlines()[-1][2:-2].split(" | ")
    assert row == ["MLP 2 x 512", "4", "0.5", "", "1", "4*", "2", "2"]


def test_pairs_are_told_with_their_first_run_and_commit(capsys):
    base = {"task": "pair", "network": "MLP", "device": "cuda", "bytes": 2**20, "commit": "abc", "steps": 4, "seconds": 2.0}
    base |= {"distance_before": 12345.6, "distance_after": 678.91, "barrier_before": 0.5, "barrier_after": 0.25}
    print_pairs([
        {**base, "solver": "ours, Sinkhorn L2", "solving": 1.0, "assigning": 0.5, "first_seconds": 3.0},
        {**base, "solver": "ours, weight matching", "solving": 1.0, "assigning": None},
        {**base, "solver": "rebasin", "failed": "TimeoutError: no luck"},
    ])  # fmt: skip
    _, _, *rows = (line[2:-2].split(" | ") for line in capsys.readouterr().out.strip().splitlines())
    reached = ["1", "12346 to 678.9", "0.500 to 0.250", "abc"]
    assert rows == [
        ["MLP", "ours, Sinkhorn L2", "2", "3 s", "0.5", "250", *reached],
        ["MLP", "ours, weight matching", "2", "not recorded", "", "", *reached],
    ]


def test_a_first_run_on_a_busy_core_is_not_told(capsys):
    record = {
        "task": "copy", "network": "mlp", "solver": "ours, default", "device": "cpu", "bytes": 2**20, "exact": True,
        "cpu_seconds": 1.0, "seconds": 5.0, "first_seconds": 6.0, "commit": "abc",
    }  # fmt: skip
    print_details([record])
    assert "1 s, first run not known, 1 MiB (abc)" in capsys.readouterr().out


def test_records_of_another_benchmark_are_refused(tmp_path):
    path = tmp_path / "records.json"
    path.write_text('{"records": [{"case": "weight matching, n = 64"}]}')
    with pytest.raises(SystemExit, match="records of another benchmark"):
        load_records(path)
