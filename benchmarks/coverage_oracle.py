"""The oracle of the coverage table: f(transformed theta) = f(theta) in float64, by running the module itself.

It shares nothing with the verification of the package but the mode that computes in float64: no program, no example input,
no scale of an output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onebasin import Symmetry, Transform
from onebasin.programs.calls import read_calls
from onebasin.programs.isolation import UnfusedAttention
from onebasin.programs.precision import Float64, promote
from onebasin.torch_internals import tree_leaves, tree_map

TOLERANCE = 1e-9
_HUGE = 1e30
"""Entries beyond it are masks, such as the least number of a type: they must be equal, and are no scale for others."""
_SCALES = (1.0, 0.4, 0.1)
"""Of random weights: the next one is tried where the network amplifies rounding errors."""


def check(symmetry: Symmetry, model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Move random weights by a random element of a symmetry, and compare what the module returns for these inputs.

    The gains that a change of basis needs to be one stay as they are. The module has its own weights again afterwards:
    statistics are drawn around them.

    Returns:
        "verdict": "right", "wrong", "refused" (the module does not take the inputs) or "unstable" (rounding errors cannot
        be told from a wrong symmetry); "error": the largest relative difference; "guilty": groups that make it.
    """
    model.double().eval()
    own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in model.state_dict().items()}
    try:
        return _check(symmetry, model, inputs)
    finally:
        _load(model, own)


def _check(symmetry: Symmetry, model: nn.Module, inputs: Any) -> dict[str, Any]:
    (call,) = read_calls(inputs)
    arguments = tree_map(promote, (call.args, call.kwargs))
    found: dict[str, Any] = {"verdict": "unstable"}
    for scale in _SCALES:
        before = draw_weights(model, scale, symmetry.fixed)
        try:
            expected = run(model, before, arguments)
        except Exception as error:
            return {"verdict": "refused", "why": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
        found = _compare(symmetry, model, before, arguments, expected)
        if found["verdict"] != "unstable":
            return found
    return found


def _compare(symmetry: Symmetry, model: nn.Module, before: dict[str, Tensor], arguments: Any, expected: list[Tensor]):
    if not any(bool(e.isfinite().any()) for e in expected):
        return {"verdict": "unstable", "error": float("nan")}
    generator = torch.Generator().manual_seed(1)
    element = Transform.random(symmetry, generator) if symmetry.scales or symmetry.bases else symmetry.random(generator)
    error = difference(expected, run(model, element.apply(before), arguments))
    if error <= TOLERANCE:
        return {"verdict": "right", "error": error}
    jittered = {
        k: v * (1 + 4e-16 * torch.randn(v.shape, generator=generator)) if v.is_floating_point() else v
        for k, v in before.items()
    }
    if error < 1e4 * difference(expected, run(model, jittered, arguments)):
        return {"verdict": "unstable", "error": error}
    guilty = [
        name
        for name in {*symmetry.groups, *(basis.group for basis in symmetry.bases.values())}
        if difference(expected, run(model, element.only(name).apply(before), arguments)) > TOLERANCE
    ]
    return {"verdict": "wrong", "error": error, "guilty": sorted(guilty)}


def run(model: nn.Module, state: Mapping[str, Any], arguments: Any) -> list[Tensor]:
    """All tensors that a module returns with a state, in float64."""
    _load(model, state)
    args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, arguments)
    torch.manual_seed(0)
    with torch.no_grad(), UnfusedAttention(), Float64():
        result = model(*args, **kwargs)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _load(model: nn.Module, state: Mapping[str, Any]) -> None:
    given = OrderedDict(state)
    given._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]  # some modules look at its version
    model.load_state_dict(given)


def draw_weights(model: nn.Module, scale: float, fixed: Collection[str] = ()) -> dict[str, Any]:
    """A random state, but for some keys: fresh norms, zero gates and statistics that are all equal would hide errors."""
    generator = torch.Generator().manual_seed(0)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    drawn: dict[int, Tensor] = {}  # tied entries stay tied

    def draw(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if key in fixed:
            return drawn.setdefault(value.data_ptr() or id(value), value.clone())
        return drawn.setdefault(value.data_ptr() or id(value), _draw(value, key in parameters, scale, generator))

    return {key: draw(key, value) for key, value in model.state_dict().items()}


def _draw(value: Tensor, is_parameter: bool, scale: float, generator: torch.Generator) -> Tensor:
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    if not is_parameter:  # statistics stay positive, masks keep their large entries
        return value * (0.75 + 0.5 * noise) + 0.05 * noise.flip(0) if value.dim() else value.clone()
    if value.dim() < 2:
        return value.clamp(-4, 4) * 0.5 + 0.5 * noise + 0.25
    return 3 * scale * (noise - 0.5) / max(1, value.shape[1:].numel()) ** 0.5


def difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference of two lists of outputs, entry by entry, relative to the entry and the mean of its tensor."""
    if [e.shape for e in expected] != [f.shape for f in found]:
        return float("inf")
    return max((_difference(e, f) for e, f in zip(expected, found, strict=True) if e.numel()), default=0.0)


def _difference(expected: Tensor, found: Tensor) -> float:
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(expected, found) else float("inf")
    ordinary = expected.abs() < _HUGE
    if not torch.equal(ordinary, found.abs() < _HUGE):
        return float("inf")
    e, f = expected[ordinary], found[ordinary]
    if not e.numel():
        return 0.0
    scale = e.abs() + e.abs().mean()
    return float(((e - f).abs() / scale.clamp_min(1e-300)).max())


def calls_to_check(inputs: Any, length: int, others: tuple[int, ...], batch: int) -> Iterator[tuple[str, Any]]:
    """Inputs of other values, then of other batch sizes, then of other lengths, each with what it differs in."""
    torch.manual_seed(1)
    yield "values", inputs(batch, length)
    yield "batch", inputs(batch + 1, length)
    for other in others:
        yield "length", inputs(batch + 1, other)
