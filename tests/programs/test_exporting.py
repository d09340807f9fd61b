"""An export follows writes that a recording cannot, leaves the module alone, and prints nothing."""

import logging
import sys

import pytest
import torch
from torch import nn

from onebasin.programs.exporting import export
from onebasin.programs.failures import NotExportable
from onebasin.tensors.states import read_state
from tests.cases import call_of, two_layers


def names(program):
    return [node.target.__name__ for node in program.graph.nodes if node.op == "call_function"]


def test_an_export_returns_what_the_module_returns():
    def forward(self, x):
        h = self.first(x)
        h[:, 0] = self.scale
        return self.last(h * self.fixed)

    model = two_layers(forward, scale=torch.tensor(2.0))
    model.register_buffer("fixed", torch.arange(8.0), persistent=False)
    call = call_of(torch.rand(3, 4))
    program = export(model, call, reason="for a test")
    assert program.front_end.reason == "for a test"
    assert sorted(program.reads) == ["first.bias", "first.weight", "last.bias", "last.weight", "scale"]
    torch.testing.assert_close(program.run(read_state(model))[0], model(*call.args))


def test_writes_that_nothing_else_reads_are_kept():
    """Graphs without visible writes are not decomposed, which takes as long as the export."""
    program = export(nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), call_of(torch.rand(3, 4)))
    assert names(program) == ["linear.default", "relu_.default", "linear.default"]


def test_regions_without_gradients_are_inlined():
    def forward(self, x):
        with torch.no_grad():
            h = self.first(x)
        return self.last(h)

    assert names(export(two_layers(forward), call_of(torch.rand(3, 4)))) == ["linear.default", "linear.default"]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, x: self.last(self.first(x) if x.sum() > 0 else x), "data-dependent"),
        (lambda self, x: self.last(self.first(x))[x[:, 0] > 0], "size of the result of index depends on values"),
        (lambda self, x: self.last(self.first(x) * self.kept), "shares the memory of one"),
        (lambda self, x: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
    ids=["branch", "size", "kept view", "error"],
)
def test_what_cannot_be_exported_is_told_in_one_line(forward, message, capfd):
    model = two_layers(forward)
    model.kept = model.first.bias.detach()
    model.train()
    with pytest.raises(NotExportable, match=message) as error:
        export(model, call_of(torch.rand(3, 4)))
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")
    assert model.training


def test_a_failed_decomposition_prints_nothing(monkeypatch, capfd):
    """A graph module prints where it fails."""

    def fail(self, table):
        print("the whole graph", file=sys.stderr)
        logging.getLogger("torch.fx.graph_module").error("the whole graph")
        raise RuntimeError("no such operation. More about it")

    def forward(self, x):
        h = self.first(x)
        h[:, 0] = 1.0
        return self.last(h)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", fail)
    logging.getLogger("torch.fx.graph_module")
    with pytest.raises(NotExportable, match=r"^RuntimeError: no such operation$"):
        export(two_layers(forward), call_of(torch.rand(3, 4)))
    assert capfd.readouterr() == ("", "")
