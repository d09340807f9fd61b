"""Axes of every kind, and tensors for them."""

import torch
from hypothesis import strategies as st

AXES = {
    "plain": "h i",
    "twice": "h h",
    "flattened": "o (h 3)",
    "heads": "(h d) o",
    "heads apart": "h d o",
    "both axes nested": "(h d) (h e)",
    "packed": "(h d)+(h e)+(h d) i",
    "sum inside": "(h (d+e)) i",
    "three levels": "o (h d u)",
    "grouped convolution": "(h d) e 2",
    "transposed": "e 2 (h d)",
    "interleaved": "(d h) i",
    "fixed parent": "f g",
    "fixed parent inside": "i (f g)",
    "bias": "h",
    "untouched": "2 2",
}


FREE = ["h", "d[h]", "e[h]", "u[h,d]", "g[f]"]


@st.composite
def states(draw):
    """Tensors for the axes above, with sizes drawn at random."""
    size = {name: draw(st.integers(1, 4)) for name in "hdeuifgo"}
    shapes = {
        "plain": ("h", "i"), "twice": ("h", "h"), "flattened": ("o", "h*3"), "heads": ("h*d", "o"),
        "heads apart": ("h", "d", "o"),
        "both axes nested": ("h*d", "h*e"), "packed": ("h*d+h*e+h*d", "i"), "sum inside": ("h*(d+e)", "i"),
        "three levels": ("o", "h*d*u"), "grouped convolution": ("h*d", "e", "2"), "transposed": ("e", "2", "h*d"),
        "interleaved": ("d*h", "i"), "fixed parent": ("f", "g"), "fixed parent inside": ("i", "f*g"), "bias": ("h",),
        "untouched": ("2", "2"),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return {
        key: torch.randn([eval(axis, {}, size) for axis in shape], generator=generator, dtype=torch.float64)
        for key, shape in shapes.items()
    }, generator
