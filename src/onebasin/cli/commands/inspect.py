"""``onebasin inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from onebasin.cli import options
from onebasin.cli.console import Output

if TYPE_CHECKING:
    from onebasin.symmetries import Symmetry

_SHOWN = 4


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="package.module:factory, torchvision:resnet50, timm:NAME, a Hugging Face folder, or a saved permutation.",
        ),
    ],
    input_shape: options.InputShape = None,
    check: options.Check = None,
    everything: Annotated[bool, typer.Option("--all", help="Every group and every axis, layers one by one.")] = False,
    json: options.Json = False,
) -> None:
    """Show which units of a model can be permuted: groups, the axes they move, and why other axes cannot."""
    output = Output(json)
    if Path(model).is_file() and Path(model).name != "config.json":
        from onebasin.symmetries import Permutation

        permutation = Permutation.load(model)
        symmetry = permutation.symmetry
        output.show(repr(permutation))
    else:
        from onebasin.checkpoints import find_architecture

        architecture = find_architecture(model, input_shape or ())
        for text in architecture.notes:
            output.note(text)
        symmetry = architecture.symmetry(check)
    if everything:
        output.show(Text(str(symmetry)))
    else:
        _show(output, symmetry)
    output.finish(_record(model, symmetry))


def _show(output: Output, symmetry: Symmetry) -> None:
    from onebasin.symmetries.describe import merge_layers, pin_reasons, summarise

    output.show(Text(symmetry.summary(), style="bold"))
    table = _table("group", "units", "axes it moves")
    for name, count, group, axes in summarise(symmetry):
        title = f"{name} x{count}" if count > 1 else name
        each = f" in each {', '.join(p.rpartition('.')[2] for p in group.parents)}" if group.parents else ""
        table.add_row(title, f"{group.size}{each}", _shorten(_relative(axes, name)))
    output.show(table)
    reasons = pin_reasons(symmetry, modules=False)
    if reasons:
        pins = _table("not free", "because")
        for why, axes in reasons.items():
            pins.add_row(_shorten(merge_layers(axes)), why)
        output.show(pins)
    if symmetry.unreached:
        output.show(f"never used by these inputs, left alone: {', '.join(merge_layers(symmetry.unreached))}")


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold underline", pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _relative(axes: list[str], name: str) -> list[str]:
    """Axes without the module that all of them and the group are in.

    >>> _relative(["h.*.mlp.up.weight[0]", "h.*.mlp.down.weight[1]"], "h.*.mlp.up")
    ['.up.weight[0]', '.down.weight[1]']
    """
    paths = [entry.split(".") for entry in (*axes, name)]
    shared = 0
    while all(len(path) > shared + 1 for path in paths) and len({path[shared] for path in paths}) == 1:
        shared += 1
    return ["." + ".".join(path[shared:]) for path in paths[:-1]] if shared else axes


def _shorten(entries: list[str]) -> str:
    more = [f"and {len(entries) - _SHOWN} more"] if len(entries) > _SHOWN else []
    return "\n".join([*entries[:_SHOWN], *more])


def _record(model: str, symmetry: Symmetry) -> dict:
    from onebasin.symmetries.describe import pin_reasons, places
    from onebasin.symmetries.layout import write

    return {
        "command": "inspect",
        "model": model,
        "summary": symmetry.summary(),
        "num_hidden": symmetry.num_hidden,
        "num_free": symmetry.num_free,
        "groups": {
            name: {"size": group.size, "parents": group.parents, "axes": places(symmetry, name)}
            for name, group in symmetry.groups.items()
        },
        "layouts": {key: write(layout) for key, layout in symmetry.layouts.items()},
        "pinned": pin_reasons(symmetry),
        "ties": symmetry.ties,
        "unreached": symmetry.unreached,
    }
