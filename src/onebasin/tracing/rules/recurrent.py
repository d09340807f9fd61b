"""Recurrent layers: one step of each, with the gates as segments over one group of hidden units."""

from __future__ import annotations

from typing import Any

from onebasin.tracing.axes.terms import Axes, AxisTerm
from onebasin.tracing.axes.unification import cut
from onebasin.tracing.rules.contraction import contract
from onebasin.tracing.rules.rearrangement import concatenate, select_entry, stack_tensors
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace

_NUM_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(trace: Trace, args: Arguments) -> list[Axes]:
    """Layers of LSTM, GRU or RNN cells, in one direction or both."""
    if "input" not in args or len(args.input) != 3:
        raise NotCovered("only sequences that are not packed are covered")
    if args["train"] and args["dropout"]:
        raise NotCovered("dropout is on in eval mode")
    time, batch = (1, 0) if args["batch_first"] else (0, 1)
    x, reason = args.input, "time has an order"
    trace.pin(x[time], reason=reason)
    steps = trace.pinned(x[time].size, reason)  # states differ from step to step also where the inputs are the same
    states = args["hx"] if args.operation == "lstm" else [args["hx"]]
    num_directions = 2 if args["bidirectional"] else 1
    weights, finals = list_cells(args, num_directions), []
    for layer in range(args["num_layers"]):
        outputs = []
        for number in range(layer * num_directions, (layer + 1) * num_directions):
            initial = [select_entry(state, 0, number) for state in states]
            final = _step(trace, (x[batch], x[2]), initial, weights[number], _NUM_GATES[args.operation])
            trace.units[args.name("params"), str(number)] = final[0][1]
            finals.append(final)
            outputs.append(tuple({time: steps, batch: final[0][0], 2: final[0][1]}[i] for i in range(3)))
        x = concatenate(trace, outputs, 2)
        trace.scope(*x)
    return [x, *(stack_tensors([final[i] for final in finals], 0) for i in range(len(states)))]


def list_cells(args: Arguments, num_directions: int) -> list[list[Any]]:
    """The weights of each cell: input to gates, state to gates, their biases, projection (None where absent)."""
    each = len(args["params"]) // (args["num_layers"] * num_directions)
    projected = args.operation == "lstm" and each in (3, 5)
    cells = []
    for start in range(0, len(args["params"]), each):
        cell = list(args["params"][start : start + each])
        projection = cell.pop() if projected else None
        cells.append([*cell, *[None] * (4 - len(cell)), projection])
    return cells


def _step(trace: Trace, x: Axes, initial: list[Axes], weights: list[Axes | None], num_gates: int) -> list[Axes]:
    """One step, for all times: gates = x W_ih^T + h W_hh^T + b; the rest is elementwise."""
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


def _linear(trace: Trace, x: Axes, weight: Axes, bias: Axes | None) -> tuple[AxisTerm, AxisTerm]:
    batch, made = contract(trace, [(x, ["batch", "in"]), (weight, ["out", "in"])], ["batch", "out"])
    return batch, made if bias is None else trace.join(made, bias[0])


def cell(trace: Trace, args: Arguments) -> list[Axes] | Axes:
    """A single step, called by hand."""
    name = args.operation.removesuffix("_cell")
    initial = args["hx"] if name == "lstm" else [args["hx"]]
    weights = [args["w_ih"], args["w_hh"], args["b_ih"], args["b_hh"], None]
    final = _step(trace, args.input, initial, weights, _NUM_GATES[name])
    trace.units[args.name("w_ih"),] = final[0][1]
    return final if name == "lstm" else final[0]


RULES: dict[str, Rule] = {
    **dict.fromkeys(_NUM_GATES, recurrent),
    **dict.fromkeys([f"{name}_cell" for name in _NUM_GATES], cell),
}
