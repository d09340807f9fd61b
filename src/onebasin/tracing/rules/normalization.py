"""Norms carry axes through, together with their weights and statistics."""

from __future__ import annotations

from typing import Any

from onebasin.tracing.axes.terms import ONE, Axes, Unknown
from onebasin.tracing.walk import Rule, Trace


def _carry(trace: Trace, channels: Unknown, a: dict[str, Any]) -> Unknown:
    for name in ("weight", "bias", "running_mean", "running_var"):
        if a.get(name) is not None:
            channels = trace.join(channels, a[name][0])
    return channels


def channel_norm(trace: Trace, a: dict[str, Any]) -> Axes:
    """Batch and instance norm: one statistic a channel, or one for each sample and channel."""
    batch, channels, *spatial = a["input"]
    trace.scope(channels)
    return (batch, _carry(trace, channels, a), *spatial)


def native_batch_norm(trace: Trace, a: dict[str, Any]) -> list[Axes]:
    """The decomposed form returns the saved statistics too: empty in eval mode."""
    values = a["node"].meta["val"]
    result = channel_norm(trace, a)
    saved = [tuple(result[1] if n == result[1].size else ONE for n in v.shape) for v in values[1:] if v.numel()]
    empty = [() if v.dim() == 0 else tuple(trace.pinned(int(n), "empty") for n in v.shape) for v in values[1:]]
    return [result, *(saved if len(saved) == len(empty) else empty)]


def trailing_norm(trace: Trace, a: dict[str, Any]) -> Axes:
    """Layer and RMS norm: the last axes are normalised together."""
    count = len(a["normalized_shape"])
    lead, last = a["input"][:-count], a["input"][-count:]
    trace.scope(*lead)  # the axes of the statistics
    for name in ("weight", "bias"):
        if a.get(name) is not None:
            last = trace.join_axes(last, a[name])
    return (*lead, *last)


def native_layer_norm(trace: Trace, a: dict[str, Any]) -> list[Axes]:
    """The decomposed form also returns mean and inverse deviation."""
    result = trailing_norm(trace, a)
    count = len(a["normalized_shape"])
    statistic = (*result[:-count], *(ONE for _ in range(count)))
    return [result, statistic, statistic]


def group_norm(trace: Trace, a: dict[str, Any]) -> Axes:
    """Channels are (group, channel): whole groups may move, and the channels inside each."""
    batch, channels, *spatial = a["input"]
    group, _ = trace.split(channels, channels.size // a["num_groups"])
    trace.scope(batch, group)  # the axes of the statistics
    return (batch, _carry(trace, channels, a), *spatial)


def weight_norm(trace: Trace, a: dict[str, Any]) -> Axes:
    """W = g v / |v|, the norm over every axis but one."""
    v, g, dim = a["v"], a["g"], a["dim"]
    joined = trace.join(v[dim], g[dim])
    return tuple(joined if axis == dim % len(v) else term for axis, term in enumerate(v))


def weight_norm_interface(trace: Trace, a: dict[str, Any]) -> list[Axes]:
    """The fused form returns the norms too."""
    return [weight_norm(trace, a), a["g"]]


STATISTICS = {"batch_norm", "instance_norm", "_native_batch_norm_legit_no_training", "native_batch_norm"}
"""Operations whose `running_mean` and `running_var` are a norm's statistics."""

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
    "_weight_norm_interface": weight_norm_interface,
}
