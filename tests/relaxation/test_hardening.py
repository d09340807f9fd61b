"""Hard permutations from scores and plans: exact within a set of nested groups."""

import pytest
import torch

import onebasin as ob
from onebasin.relaxation import hardening
from onebasin.relaxation.hardening import Hardening, carry_to_parents, harden, harden_all, joint_groups, joint_weights


def test_hardening_is_exact_on_nested_groups():
    """Against all permutations of a small tree."""
    import itertools

    state = {"w": torch.zeros(6, 1), "b": torch.zeros(2)}
    symmetry = ob.Symmetry.from_axes({"w": "(h d) i", "b": "h"}, ["h", "d[h]"], state)
    assert [[g.name for g in tree] for tree in joint_groups(symmetry)] == [["h", "d"]]
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        scores = {"h": torch.randn(2, 2, generator=generator), "d": torch.randn(2, 2, 3, 3, generator=generator)}

        def total(s, p0, p1, scores=scores):
            return sum(
                float(scores["h"][h, s[h]]) + sum(float(scores["d"][h, s[h], d, p[d]]) for d in range(3))
                for h, p in enumerate((p0, p1))
            )

        best = max(
            total(s, p0, p1)
            for s in itertools.permutations(range(2))
            for p0 in itertools.permutations(range(3))
            for p1 in itertools.permutations(range(3))
        )
        found = harden(symmetry, scores)
        assert total(found["h"].tolist(), *found["d"].tolist()) == pytest.approx(best)


STATE = {"w": torch.zeros(6, 1), "b": torch.zeros(2)}
NESTED = ob.Symmetry.from_axes({"w": "(h d) i", "b": "h"}, ["h", "d[h]"], STATE)


def test_groups_that_are_not_chosen_stay():
    scores = {"h": torch.eye(2).flip(0), "d": torch.eye(3).flip(0).expand(2, 2, 3, 3)}
    assert harden(NESTED, scores)["h"].tolist() == [1, 0]
    found = harden(NESTED, scores, [NESTED.groups["d"]])
    assert found["h"].tolist() == [0, 1]
    assert found["d"].tolist() == [[2, 1, 0]] * 2


def test_parents_have_the_scores_of_children_that_keep_their_order():
    scores = {"h": torch.randn(2, 2), "d": torch.randn(2, 2, 3, 3)}
    total = carry_to_parents(NESTED, scores)
    torch.testing.assert_close(total["h"], scores["h"] + torch.einsum("hjdd->hj", scores["d"]))
    assert total["d"] is scores["d"]


def test_a_child_counts_with_the_weight_of_its_parents():
    plans = {"h": torch.rand(2, 2), "d": torch.rand(2, 2, 3, 3)}
    weights = joint_weights(NESTED, plans)
    torch.testing.assert_close(weights["d"], plans["d"] * plans["h"][:, :, None, None])
    assert not weights["h"].any()


def test_starts_are_left_for_the_next_call_where_duals_came_for_nothing(monkeypatch):
    """As on a GPU; the scores of a group that was settled at once leave nothing."""
    symmetry = ob.Symmetry.from_axes({"w": "h i", "v": "o j"}, ["h", "o"], {"w": torch.zeros(9, 1), "v": torch.zeros(5, 1)})
    scores = {"h": torch.randn(9, 9, generator=torch.Generator().manual_seed(0)), "o": torch.eye(5)}
    given, plain = [], hardening.assign_all

    def assign_all(matrices, starts):
        given.append(starts)
        return plain(matrices, starts, wants_prices=True)

    starts = {}
    assert harden(symmetry, scores, starts=starts) == harden(symmetry, scores)
    assert not starts
    monkeypatch.setattr(hardening, "assign_all", assign_all)
    first = harden(symmetry, scores, starts=starts)
    assert starts.keys() == {"h"}
    assert harden(symmetry, scores, starts=starts) == first
    assert [start is not None for start in given[-1]] == [len(matrix) == 9 for matrix in (scores["o"], scores["h"])]


def test_several_scores_are_hardened_together(monkeypatch):
    """As each alone, with one call of the solver for each level of nested groups."""
    called, plain = [], hardening.assign_all
    monkeypatch.setattr(hardening, "assign_all", lambda *args: called.append(1) or plain(*args))
    scores = [{"h": torch.rand(2, 2), "d": torch.rand(2, 2, 3, 3)} for _ in range(3)]
    found = harden_all(NESTED, [Hardening(scores[0]), Hardening(scores[1], carry=False), Hardening(scores[2])])
    assert len(called) == 2
    assert found == [harden(NESTED, each, carry=carry) for each, carry in zip(scores, (True, False, True), strict=True)]
