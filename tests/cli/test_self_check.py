import dataclasses

import pytest
import torch

import onebasin as ob
from onebasin.cli import self_check


def test_all_checks_pass_here():
    checks = list(self_check.run_checks(["cpu"]))
    assert [check.passed for check in checks] == [True, True, True], checks
    assert sum(check.seconds for check in checks) < 60


def test_a_permutation_that_is_not_found_is_reported(monkeypatch):
    align = ob.align

    def miss(*arguments, **options):
        found = align(*arguments, **options)
        return dataclasses.replace(found, permutation=found.permutation.symmetry.identity())

    monkeypatch.setattr(self_check.ob, "align", miss)
    passed, detail = self_check.find_planted_permutation()
    assert not passed
    assert "not found" in detail


def test_a_wrong_gradient_is_reported(monkeypatch):
    sinkhorn = ob.sinkhorn

    def off(values, **options):
        return sinkhorn(values.detach() + 1.001 * (values - values.detach()), **options)

    monkeypatch.setattr(self_check.ob, "sinkhorn", off)
    assert not self_check.compare_gradients("cpu")[0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gradient_on_a_gpu():
    assert self_check.compare_gradients("cuda:0")[0]


def test_an_exception_is_a_check_that_failed(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(self_check.ob, "sinkhorn", fail)
    gradient = list(self_check.run_checks(["cpu"]))[1]
    assert gradient.passed is False
    assert "no kernel" in gradient.detail


def test_without_matplotlib_the_report_is_left_out(monkeypatch):
    monkeypatch.setattr(self_check.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(self_check, "find_planted_permutation", lambda: (True, ""))
    *_, report = self_check.run_checks([])
    assert report.passed is None
    assert "onebasin[plots]" in report.detail
