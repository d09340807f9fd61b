"""Norms carry axes through, together with their weights and statistics."""

from __future__ import annotations

from onebasin.tracing.axes.terms import ONE, Axes, AxisTerm, Product, has_uniform_parts
from onebasin.tracing.axes.unification import split
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace, replace_axis


def _carry(trace: Trace, channels: AxisTerm, args: Arguments) -> AxisTerm:
    for name in ("weight", "bias", "running_mean", "running_var"):
        if args.get(name) is not None:
            channels = trace.join(channels, args[name][0])
    return channels


def channel_norm(trace: Trace, args: Arguments) -> Axes:
    """Batch and instance norm: one statistic per channel, or one per sample and channel."""
    if len(args.input) < 2:
        raise NotCovered("there is no axis of channels")
    batch, channels, *spatial = args.input
    trace.scope(channels)
    trace.scope(batch, channels)  # the axes of the statistics of each sample
    return (batch, _carry(trace, channels, args), *spatial)


def native_batch_norm(trace: Trace, args: Arguments) -> list[Axes]:
    """The decomposed form also returns the saved statistics, which are empty in eval mode."""
    result = channel_norm(trace, args)
    num_channels = result[1].size
    return [result] + [
        tuple(result[1] if n == num_channels else ONE if n == 1 else trace.pinned(n, "empty") for n in shape)
        for shape in args.shapes[1:]
    ]


def trailing_norm(trace: Trace, args: Arguments) -> Axes:
    """Layer and RMS norm: the last axes are normalised together."""
    count = len(args["normalized_shape"])
    leading, last = args.input[:-count], args.input[-count:]
    trace.scope(*leading)  # the axes of the statistics
    for name in ("weight", "bias"):
        if args.get(name) is not None:
            last = trace.join_axes(last, args[name])
    return (*leading, *last)


def native_layer_norm(trace: Trace, args: Arguments) -> list[Axes]:
    """The decomposed form also returns mean and inverse deviation."""
    result = trailing_norm(trace, args)
    count = len(args["normalized_shape"])
    statistic = (*result[:-count], *(ONE for _ in range(count)))
    return [result, statistic, statistic]


def group_norm(trace: Trace, args: Arguments) -> Axes:
    """Channels are (group, channel): whole groups may move, and the channels inside each."""
    batch, channels, *spatial = args.input
    size = channels.size // args["num_groups"]
    halves = split(channels, size)
    if halves is None and not has_uniform_parts(channels):
        halves = _split_within(trace, channels, size)
    if halves is None:  # what is uniform is so in each group alone, because the groups have other channels too
        halves = trace.split(channels, size)
        channels = Product(halves)
    group, _ = halves
    trace.scope(batch, group)  # the axes of the statistics
    return (batch, _carry(trace, channels, args), *spatial)


def _split_within(trace: Trace, channels: AxisTerm, size: int) -> tuple[AxisTerm, AxisTerm] | None:
    """Split channels into the largest blocks that lie inside of groups, where the groups lie across their structure.

    A group of 4 over the concatenation of 6 and 10 channels has channels of both. The blocks of 2 stay in their places,
    because a group has several of them, and the channels inside each are free.
    """
    for block in range(size - 1, 1, -1):
        if size % block == 0 and (halves := split(channels, block)) is not None:
            trace.pin(halves[0], reason="a normalised group lies across several axes")
            return halves
    return None


def weight_norm(trace: Trace, args: Arguments) -> Axes:
    """W = g v / |v|, the norm over every axis but one, or over all of them if g is a number."""
    v, g = args["v"], args["g"]
    if not g:
        return v
    dim = args["dim"] % len(v)
    return replace_axis(v, dim, trace.join(v[dim], g[dim]))


RULES: dict[str, Rule] = {
    "batch_norm": channel_norm,
    "instance_norm": channel_norm,
    "_native_batch_norm_legit_no_training": native_batch_norm,
    "native_batch_norm": native_batch_norm,
    "layer_norm": trailing_norm,
    "rms_norm": trailing_norm,
    "native_layer_norm": native_layer_norm,
    "group_norm": group_norm,
    "_weight_norm": weight_norm,
    "_weight_norm_interface": lambda trace, args: [weight_norm(trace, args), args["g"]],  # also returns the norms
}
