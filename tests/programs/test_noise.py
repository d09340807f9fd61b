"""Which operations draw random numbers, and how dropout is turned off."""

import pytest
import torch
from torch.nn import functional as F

from onebasin.programs.noise import disable_dropout, draws_numbers
from onebasin.programs.recording import record
from tests.cases import call_of, two_layers


@pytest.mark.parametrize(
    ("forward", "draws", "draws_without_dropout"),
    [
        (lambda self, x: self.last(self.first(x)), False, False),
        (lambda self, x: self.last(F.dropout(self.first(x), training=False)), False, False),
        (lambda self, x: self.last(F.dropout(self.first(x), training=True)), True, False),
        (lambda self, x: self.last(F.feature_alpha_dropout(self.first(x), training=True)), True, False),
        (lambda self, x: F.scaled_dot_product_attention(h := self.first(x), h, h), False, False),
        (lambda self, x: F.scaled_dot_product_attention(h := self.first(x), h, h, dropout_p=0.5), True, False),
        (lambda self, x: F.rrelu(self.first(x), training=True), True, False),
        (lambda self, x: self.last(self.first(x) + torch.rand(8)), True, True),
    ],
)
def test_operations_that_draw(forward, draws, draws_without_dropout):
    graph = record(two_layers(forward), call_of(torch.rand(3, 4))).graph
    assert any(map(draws_numbers, graph.nodes)) == draws
    disable_dropout(graph)
    assert any(map(draws_numbers, graph.nodes)) == draws_without_dropout
