"""Recurrent layers: one step of each, with the gates as segments over one group of hidden units."""

from __future__ import annotations

from typing import Any

from onebasin.tracing.axes.terms import Axes, Unknown
from onebasin.tracing.axes.unification import cut
from onebasin.tracing.rules.contraction import contract
from onebasin.tracing.rules.rearrangement import cat, select, stack
from onebasin.tracing.walk import Rule, Trace

_NUM_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(trace: Trace, a: dict[str, Any]) -> list[Axes]:
    """Layers of LSTM, GRU or RNN cells, in one direction or both; packed sequences are not covered."""
    name = a["node"].target.name().removeprefix("aten::").partition(".")[0]
    if a["train"] and a["dropout"]:
        raise ValueError("dropout is on in eval mode")
    time, batch = (1, 0) if a["batch_first"] else (0, 1)
    x = a["input"]
    trace.pin(x[time], reason="time has an order")
    states = [a["hx"]] if name != "lstm" else a["hx"]
    num_directions = 2 if a["bidirectional"] else 1
    weights, finals = _cells(a, name, num_directions), []
    for layer in range(a["num_layers"]):
        outputs = []
        for direction in range(num_directions):
            number = layer * num_directions + direction
            initial = [select(trace, {"input": state, "dim": 0, "index": number}) for state in states]
            final = _step(trace, (x[batch], x[2]), initial, weights[number], _NUM_GATES[name])
            trace.units[str(a["node"].args[2]), str(number)] = final[0][1]
            finals.append(final)
            outputs.append(tuple({time: x[time], batch: final[0][0], 2: final[0][1]}[i] for i in range(3)))
        x = cat(trace, {"tensors": outputs, "dim": 2})
        trace.scope(*x)
    return [x, *(stack(trace, {"tensors": [f[i] for f in finals], "dim": 0}) for i in range(len(states)))]


def _cells(a: dict[str, Any], name: str, num_directions: int) -> list[list[Axes | None]]:
    """The weights of each cell: input to gates, state to gates, their biases, projection (None where absent)."""
    count = a["num_layers"] * num_directions
    each = len(a["params"]) // count
    projected = name == "lstm" and each in (3, 5)
    cells = []
    for start in range(0, len(a["params"]), each):
        cell = list(a["params"][start : start + each])
        projection = cell.pop() if projected else None
        cells.append([*cell, *[None] * (4 - len(cell)), projection])
    return cells


def _step(trace: Trace, x: Axes, initial: list[Axes], weights: list[Axes | None], num_gates: int) -> list[Axes]:
    """One step, for all times: gates = x W_ih^T + h W_hh^T + b, then everything is elementwise."""
    to_gates, from_state, bias, state_bias, projection = weights
    assert to_gates is not None
    assert from_state is not None
    hidden = initial[0]
    gates = [
        _linear(trace, x, to_gates, bias),
        _linear(trace, (hidden[0], from_state[1]), from_state, state_bias),
    ]
    size = to_gates[0].size // num_gates
    marks = range(size, to_gates[0].size, size)
    units = trace.join(*(part for _, axis in gates for part in cut(axis, marks)))
    batch = trace.join(x[0], *(state[0] for state in initial))
    cell = (batch, units)
    for state in initial[1:]:
        cell = (batch, trace.join(units, state[1]))
    made = cell if projection is None else _linear(trace, cell, projection, None)
    hidden = (batch, trace.join(made[1], hidden[1], from_state[1]))
    trace.scope(*hidden)
    trace.scope(*cell)
    return [hidden, cell][: len(initial)]


def _linear(trace: Trace, x: Axes, weight: Axes, bias: Axes | None) -> tuple[Unknown, Unknown]:
    batch, made = contract(trace, [(x, ["batch", "in"]), (weight, ["out", "in"])], ["batch", "out"])
    return batch, made if bias is None else trace.join(made, bias[0])


def cell(trace: Trace, a: dict[str, Any]) -> list[Axes] | Axes:
    """A single step, called by hand."""
    name = a["node"].target.name().removeprefix("aten::").partition(".")[0].removesuffix("_cell")
    initial = a["hx"] if name == "lstm" else [a["hx"]]
    weights = [a["w_ih"], a["w_hh"], a["b_ih"], a["b_hh"], None]
    final = _step(trace, a["input"], initial, weights, _NUM_GATES[name])
    trace.units[str(a["node"].args[2]),] = final[0][1]
    return final if name == "lstm" else final[0]


RULES: dict[str, Rule] = {
    **dict.fromkeys(_NUM_GATES, recurrent),
    **dict.fromkeys([f"{name}_cell" for name in _NUM_GATES], cell),
}
