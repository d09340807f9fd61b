"""Fourier transforms mix the positions of an axis; complex numbers are pairs of real ones."""

from __future__ import annotations

from onebasin.tracing.axes.terms import Axes
from onebasin.tracing.rules.elementwise import pointwise
from onebasin.tracing.rules.reduction import ordered
from onebasin.tracing.trace import Arguments, Rule, Trace

_PARTS = "real and imaginary parts"


def view_as_complex(trace: Trace, args: Arguments) -> Axes:
    """The last axis holds real and imaginary parts."""
    *kept, parts = args.input
    trace.pin(parts, reason=_PARTS)
    trace.scope(*kept)
    return tuple(kept)


def view_as_real(trace: Trace, args: Arguments) -> Axes:
    """A new last axis for real and imaginary parts."""
    return (*args.input, trace.pinned(2, _PARTS))


_TRANSFORMS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")

RULES: dict[str, Rule] = {
    **{f"fft_{name}{kind}": ordered for name in _TRANSFORMS for kind in ("", "2", "n")},
    **dict.fromkeys(("fft_fftshift", "fft_ifftshift", "_fft_r2c", "_fft_c2c", "_fft_c2r"), ordered),
    "view_as_complex": view_as_complex,
    "view_as_real": view_as_real,
    **dict.fromkeys(("polar", "complex"), pointwise),
    **dict.fromkeys(
        ("real", "imag", "conj", "_conj", "conj_physical", "resolve_conj", "resolve_neg", "_neg_view"), pointwise
    ),
}
