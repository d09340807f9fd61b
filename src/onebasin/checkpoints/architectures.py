"""From the name of an architecture to a module and example inputs, without a download and without code from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.checkpoints.factories import build_hollow, build_on_cpu, build_on_meta, find_factory
from onebasin.symmetries import Symmetry
from onebasin.torch_internals import tree_map
from onebasin.tracing import Kinds
from onebasin.tracing import symmetry as trace

_TYPES = {"float": torch.float32, "long": torch.int64, "int": torch.int32, "bool": torch.bool}
_VERIFIED_UP_TO = 5 * 10**7
"""Parameters. Larger models are traced by shape alone: to be verified, they would have to fit into memory in float64."""


@dataclass(frozen=True)
class Architecture:
    """How to build a model, and what to call it with.

    Attributes:
        name: the specification that the user gave.
        make: builds the module; its weights have no meaning.
        example_inputs: as `onebasin.symmetry` takes them.
        notes: remarks for the user about how it is built.
    """

    name: str
    make: Callable[[], nn.Module]
    example_inputs: Any
    notes: tuple[str, ...] = ()

    def on_meta(self) -> nn.Module:
        """The module in eval mode, without memory for its weights if its constructor allows that."""
        return build_on_meta(self.make)

    def build(self) -> nn.Module:
        """The module in eval mode on the CPU."""
        return build_on_cpu(self.make)

    def build_hollow(self) -> nn.Module:
        """The module in eval mode on the CPU, to be traced: its parameters take no memory, and have no meaning."""
        return build_hollow(self.make)

    def shapes(self) -> dict[str, Tensor]:
        """Every key of the state dict as a meta tensor."""
        return {key: value.detach().to("meta") for key, value in self.on_meta().state_dict().items()}

    def symmetry(self, verify: bool | None = None, kinds: Kinds = "permutation", model: nn.Module | None = None) -> Symmetry:
        """The symmetry; verified on random weights if `verify`, by default for models of up to 50 million parameters.

        Args:
            verify: check it.
            kinds: which, see `onebasin.symmetry`. Changes of basis depend on the values of gains, so "all" needs `model`.
            model: to trace in place of a new one; of this architecture, on the CPU.
        """
        assert model is not None or kinds != "all"
        traced = self.on_meta() if model is None else model
        if verify is None:
            verify = sum(p.numel() for p in traced.parameters()) <= _VERIFIED_UP_TO
        if verify and model is None:
            traced = self.build()
        inputs = self.example_inputs
        if any(p.is_meta for p in traced.parameters()):
            inputs = tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, inputs)
        return trace(traced, inputs, verify=verify, kinds=kinds)


def find_architecture(
    specification: str,
    input_shapes: Sequence[str] = (),
    example_inputs: Any = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> Architecture:
    """Find an architecture by its name.

    Args:
        specification: "package.module:factory" (a callable without arguments that returns a module, or a pair of a module
            and example inputs), "torchvision:NAME", "timm:NAME", or a Hugging Face folder, whose configuration is read.
        input_shapes: shapes of the example inputs, such as "1,3,224,224", "1,8:long" or "input_ids=1,8:long". Not needed
            if the specification provides example inputs.
        example_inputs: used if neither shapes nor the specification provide any.
        tensors: of the checkpoint, if there is one, on the meta device: a configuration with more layers, experts or tokens
            than they can have is refused before it is built.

    Raises:
        ValueError: if there is no such architecture, or no example inputs.

    >>> import sys, tempfile
    >>> from pathlib import Path
    >>> from onebasin.checkpoints import find_architecture
    >>> code = "from torch import nn; make = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))"
    >>> sys.path.append(tempfile.mkdtemp())
    >>> _ = Path(sys.path[-1], "small_nets.py").write_text(code)
    >>> find_architecture("small_nets:make", ["1,4"]).symmetry().summary()
    '1 group; 8 of 8 hidden units free (100.0%)'
    """
    given = read_inputs(input_shapes) if input_shapes else None
    factory = find_factory(specification, tensors)
    inputs = next((inputs for inputs in (given, factory.example_inputs, example_inputs) if inputs is not None), None)
    if inputs is None:
        raise ValueError(f"the example inputs of {specification} are not known: give --input-shape, such as 1,3,224,224")
    return Architecture(specification, factory.make, inputs, factory.notes)


def read_inputs(shapes: Sequence[str]) -> Any:
    """Example inputs of given shapes: normally distributed numbers, or zeros for integers.

    >>> {name: tuple(value.shape) for name, value in read_inputs(["ids=1,8:long", "mask=1,8:bool"]).items()}
    {'ids': (1, 8), 'mask': (1, 8)}
    """
    generator = torch.Generator().manual_seed(0)
    found: list[tuple[str, Tensor]] = []
    for text in shapes:
        match = re.fullmatch(r"(?:(\w+)=)?([1-9]\d*(?:[,x][1-9]\d*)*)(?::(\w+))?", text.replace(" ", ""))
        kind = _TYPES.get(match[3] or "float") if match else None
        if match is None or kind is None:
            raise ValueError(
                f"cannot read the input shape {text!r}: write 1,3,224,224, or 1,8:long, or input_ids=1,8:long "
                f"(types: {', '.join(_TYPES)})"
            )
        size = [int(n) for n in re.split("[,x]", match[2])]
        value = torch.randn(size, generator=generator) if kind.is_floating_point else torch.zeros(size, dtype=kind)
        found.append((match[1] or "", value))
    if any(name for name, _ in found):
        if not all(name for name, _ in found):
            raise ValueError("name all of the inputs or none of them")
        return dict(found)
    return tuple(value for _, value in found)
