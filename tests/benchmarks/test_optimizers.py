"""The benchmark of optimisers: what it measures on a pair and on a copy, and what its tables say."""

import torch
from torch import nn

from benchmarks.optimizers import Trial, describe_copies, describe_pairs, measure, measure_copies


def make_trial():
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 2)) for _ in range(2)]
    batches = [(torch.randn(8, 3), torch.arange(8) % 2)]
    return Trial(networks[0], networks[1], nn.functional.cross_entropy, batches, batches, num_points=3)


def test_a_pair_by_a_setting():
    found = measure(make_trial(), {"optimizer": "row-adam", "steps": 20})
    assert 0 < found["cost polished"] <= found["cost plain"]
    assert 0 < found["steps plain"] <= 20
    by_loss = measure(make_trial(), {"optimizer": "adam", "steps": 3}, on_midpoint=True)
    assert by_loss["steps plain"] == 3
    assert "cost polished" not in by_loss


def test_pairs_are_compared_with_adam():
    def record(pair, setting, cost):
        kept = {f"{key} {when}": cost for key in ("cost", "barrier", "seconds", "steps") for when in ("plain", "polished")}
        return {"family": "F", "pair": pair, "setting": setting, **kept}

    records = [
        record(0, "adam", 1.0),
        record(1, "adam", 3.0),
        record(0, "row-adam 0.5", 2.0),
        record(1, "row-adam 0.5", 2.0),
    ]
    _, _, base, other = describe_pairs([*records, record(2, "row-adam 0.5", 9.0)])
    assert base == "| F | 2 | adam | 2 | 2 | 2 | 2 | 2 | 2 |"
    assert other == "| F | 2 | row-adam 0.5 |" + 4 * " 2 (+0.0 %, p = 1) |" + " 2 | 2 |"


def test_planted_copies_are_counted():
    records = list(measure_copies("Rnd", 2, [0, 1], ["row-adam 0.5"]))
    assert describe_copies(records)[-1] == "| all | 2 | 2 plain, 2 polished |"
