"""Convolutions: channels are contracted, within groups if there are any; positions keep their place."""

from __future__ import annotations

from typing import Any

from onebasin.tracing.axes.terms import Axes, Product, Unknown
from onebasin.tracing.walk import Rule, Trace


def convolution(trace: Trace, a: dict[str, Any], transposed: bool = False) -> Axes:
    """y[o] = sum_c w[o, c] * x[c]; with groups, o and c run inside each group.

    Channels of a grouped convolution are (group, channel): whole groups may move, and the channels inside each.
    """
    x, weight, groups = a["input"], a["weight"], a["groups"]
    num_spatial = len(weight) - 2
    *batch, channels = x[: len(x) - num_spatial]
    if transposed:
        group, inside = trace.split(channels, channels.size // groups)
        group_w, inside_w = trace.split(weight[0], weight[0].size // groups)
        made = weight[1]
    else:
        group, inside = trace.split(channels, channels.size // groups)
        group_w, made = trace.split(weight[0], weight[0].size // groups)
        inside_w = weight[1]
    group = trace.join(group, group_w)
    inside = trace.join(inside, inside_w)
    trace.scope(group, inside)  # what the input and the weight share
    trace.scope(group, made)  # what the weight and the result share
    produced = group if made.size == 1 else made if group.size == 1 else Product((group, made))
    if a["bias"] is not None:
        produced = trace.join(produced, a["bias"][0])
    trace.units[str(a["node"].args[1]),] = produced
    return (*batch, produced, *_positions(trace, a, x[len(x) - num_spatial :], weight[2:]))


def _positions(trace: Trace, a: dict[str, Any], spatial: Axes, kernel: Axes) -> Axes:
    """A kernel of one position lets positions through; any other tells neighbours apart."""
    trivial = all(k.size == 1 for k in kernel) and _all(a["stride"], 1) and _all(a["padding"], 0)
    if trivial and _all(a.get("output_padding", 0), 0):
        return spatial
    reason = "neighbouring positions are told apart"
    trace.pin(*spatial, *kernel, reason=reason)
    shape = a["node"].meta["val"].shape
    return tuple(trace.pinned(int(n), reason) for n in shape[len(shape) - len(spatial) :])


def _all(value: Any, expected: int) -> bool:
    if isinstance(value, str):
        return value == "valid" and expected == 0
    return all(v == expected for v in value) if isinstance(value, (list, tuple)) else value == expected


def conv_transpose(trace: Trace, a: dict[str, Any]) -> Axes:
    """The weight has the input channels first."""
    return convolution(trace, a, transposed=True)


def any_convolution(trace: Trace, a: dict[str, Any]) -> Axes:
    """The general operation that the others decompose into."""
    return convolution(trace, a, transposed=a["transposed"])


def pixel_shuffle(trace: Trace, a: dict[str, Any]) -> Axes:
    """Channels (c, r, r) become c channels at r times the resolution."""
    *batch, channels, height, width = a["input"]
    factor = a["upscale_factor"]
    kept, inner = trace.split(channels, factor * factor)
    reason = "channels become positions"
    trace.pin(inner, height, width, reason=reason)
    return (
        *batch,
        kept,
        trace.pinned(height.size * factor, reason),
        trace.pinned(width.size * factor, reason),
    )


def pixel_unshuffle(trace: Trace, a: dict[str, Any]) -> Axes:
    """Positions become channels: (c, r, r)."""
    *batch, channels, height, width = a["input"]
    factor = a["downscale_factor"]
    reason = "positions become channels"
    trace.pin(height, width, reason=reason)
    inner: Unknown = trace.pinned(factor * factor, reason)
    made = Product((channels, inner))
    return (
        *batch,
        made,
        trace.pinned(height.size // factor, reason),
        trace.pinned(width.size // factor, reason),
    )


def unfold(trace: Trace, a: dict[str, Any]) -> Axes:
    """Windows along one axis: positions become (window, place in it), the place last."""
    reason = "windows overlap"
    axes, dim = a["input"], a["dimension"] % len(a["input"])
    trace.pin(axes[dim], reason=reason)
    shape = a["node"].meta["val"].shape
    windows, place = trace.pinned(int(shape[dim]), reason), trace.pinned(int(shape[-1]), reason)
    return (*axes[:dim], windows, *axes[dim + 1 :], place)


def im2col(trace: Trace, a: dict[str, Any]) -> Axes:
    """Windows of an image as columns: channels become (channel, place in the window)."""
    reason = "positions become channels"
    *batch, channels, height, width = a["input"]
    trace.pin(height, width, reason=reason)
    *_, made, positions = a["node"].meta["val"].shape
    places = trace.pinned(int(made) // channels.size, reason)
    return (*batch, Product((channels, places)), trace.pinned(int(positions), reason))


def col2im(trace: Trace, a: dict[str, Any]) -> Axes:
    """The sum of such columns as an image."""
    reason = "channels become positions"
    *batch, columns, positions = a["input"]
    *_, made, height, width = a["node"].meta["val"].shape
    channels, places = trace.split(columns, columns.size // int(made))
    trace.pin(places, positions, reason=reason)
    return (*batch, channels, trace.pinned(int(height), reason), trace.pinned(int(width), reason))


RULES: dict[str, Rule] = {
    "unfold": unfold,
    "im2col": im2col,
    "col2im": col2im,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), conv_transpose),
    "convolution": any_convolution,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
}
