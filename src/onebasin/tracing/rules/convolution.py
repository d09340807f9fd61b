"""Convolutions: channels are contracted, within groups if there are any; positions stay in place."""

from __future__ import annotations

from typing import Any

from onebasin.tracing.axes.terms import Axes, Product
from onebasin.tracing.trace import Arguments, Rule, Trace, replace_axis

_NEIGHBOURS = "neighbouring positions are told apart"
_TO_POSITIONS = "channels become positions"
_TO_CHANNELS = "positions become channels"


def convolution(trace: Trace, args: Arguments) -> Axes:
    """y[o] = sum_c w[o, c] * x[c]; with groups, o and c run inside each group.

    Channels of a grouped convolution are (group, channel): whole groups may move, and the channels inside each. The weight
    of a transposed convolution has the input channels first.
    """
    x, weight, groups = args.input, args["weight"], args["groups"]
    num_spatial = len(weight) - 2
    *batch, channels = x[: len(x) - num_spatial]
    group, inside = trace.split(channels, channels.size // groups)
    group_w, first = trace.split(weight[0], weight[0].size // groups)
    transposed = args.get("transposed", "transpose" in args.operation)
    inside_w, made = (first, weight[1]) if transposed else (weight[1], first)
    group = trace.join(group, group_w)
    trace.join(inside, inside_w)
    trace.sum_over(inside, inside_w)
    trace.scope(group, inside_w)  # what the input and the weight share
    trace.scope(group, made)  # what the weight and the result share
    spatial = x[len(x) - num_spatial :]
    positions = _positions(trace, args, spatial, weight[2:])
    trace.scope(*batch, group, *(positions if positions is spatial else ()))  # what the input and the result share
    produced = group if made.size == 1 else made if group.size == 1 else Product((group, made))
    if args["bias"] is not None:
        produced = trace.join(produced, args["bias"][0])
    trace.units[args.name("weight"),] = produced
    return (*batch, produced, *positions)


def _positions(trace: Trace, args: Arguments, spatial: Axes, kernel: Axes) -> Axes:
    """A kernel of one position keeps positions; any other tells neighbours apart."""
    is_trivial = all(k.size == 1 for k in kernel) and _all(args["stride"], 1) and _all(args["padding"], 0)
    if is_trivial and _all(args.get("output_padding", 0), 0):
        return spatial
    trace.pin(*spatial, *kernel, reason=_NEIGHBOURS)
    return tuple(trace.pinned(n, _NEIGHBOURS) for n in args.shape[-len(kernel) :])


def _all(value: Any, expected: int) -> bool:
    if isinstance(value, str):
        return value == "valid" and expected == 0
    return all(v == expected for v in value) if isinstance(value, (list, tuple)) else value == expected


def pixel_shuffle(trace: Trace, args: Arguments) -> Axes:
    """Channels (c, r, r) become c channels at r times the resolution."""
    *batch, channels, height, width = args.input
    kept, inner = trace.split(channels, args["upscale_factor"] ** 2)
    trace.pin(inner, height, width, reason=_TO_POSITIONS)
    trace.scope(*batch, kept)
    return (*batch, kept, *(trace.pinned(n, _TO_POSITIONS) for n in args.shape[-2:]))


def pixel_unshuffle(trace: Trace, args: Arguments) -> Axes:
    """Positions become channels: (c, r, r)."""
    *batch, channels, height, width = args.input
    trace.pin(height, width, reason=_TO_CHANNELS)
    trace.scope(*batch, channels)
    made = Product((channels, trace.pinned(args["downscale_factor"] ** 2, _TO_CHANNELS)))
    return (*batch, made, *(trace.pinned(n, _TO_CHANNELS) for n in args.shape[-2:]))


def unfold(trace: Trace, args: Arguments) -> Axes:
    """Windows along one axis: positions become (window, position in it), the latter last."""
    dim, reason = args.axis(args["dimension"]), "windows overlap"
    trace.pin_order(args.input, [dim], reason)
    windows, inside = (trace.pinned(args.shape[i], reason) for i in (dim, -1))
    return (*replace_axis(args.input, dim, windows), inside)


def im2col(trace: Trace, args: Arguments) -> Axes:
    """Windows of an image as columns: channels become (channel, position in the window)."""
    *batch, channels, height, width = args.input
    trace.pin(height, width, reason=_TO_CHANNELS)
    trace.scope(*batch, channels)
    *_, made, positions = args.shape
    inside = trace.pinned(made // channels.size, _TO_CHANNELS)
    return (*batch, Product((channels, inside)), trace.pinned(positions, _TO_CHANNELS))


def col2im(trace: Trace, args: Arguments) -> Axes:
    """The sum of such columns as an image."""
    *batch, columns, positions = args.input
    *_, made, height, width = args.shape
    channels, inside = trace.split(columns, columns.size // made)
    trace.pin(inside, positions, reason=_TO_POSITIONS)
    trace.scope(*batch, channels)
    return (*batch, channels, trace.pinned(height, _TO_POSITIONS), trace.pinned(width, _TO_POSITIONS))


RULES: dict[str, Rule] = {
    "unfold": unfold,
    "im2col": im2col,
    "col2im": col2im,
    **{f"{name}{n}d": convolution for name in ("conv", "conv_transpose") for n in (1, 2, 3)},
    "convolution": convolution,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
}
