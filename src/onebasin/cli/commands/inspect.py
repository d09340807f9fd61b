"""``onebasin inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from onebasin.checkpoints import find_architecture
from onebasin.cli import options
from onebasin.cli.console import Output
from onebasin.symmetries import Permutation, Symmetry
from onebasin.symmetries.describe import merge_layers, pin_reasons, places, summarise
from onebasin.symmetries.layout import write

_SHOWN = 4


def inspect(
    architecture: Annotated[
        str,
        typer.Argument(
            metavar="ARCHITECTURE",
            help="package.module:factory, torchvision:NAME, timm:NAME, a Hugging Face folder, or a saved permutation.",
        ),
    ],
    input_shape: options.InputShape = None,
    check: options.Check = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every layer by itself, with all axes.")] = False,
    json: options.Json = False,
) -> None:
    """Show which units of a model can be permuted: groups, the axes they move, and why other axes cannot."""
    output = Output(json)
    if Path(architecture).is_file() and Path(architecture).name != "config.json":
        permutation = Permutation.load(architecture)
        symmetry = permutation.symmetry
        output.show(repr(permutation))
    else:
        found = find_architecture(architecture, input_shape or ())
        for note in found.notes:
            output.note(note)
        symmetry = found.symmetry(check)
    if everything:
        output.show(Text(str(symmetry)))
    else:
        _show(output, symmetry)
    output.finish({"command": "inspect", "model": architecture, **_list_contents(symmetry)})


def _show(output: Output, symmetry: Symmetry) -> None:
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
    """Axes without the name of the module that contains all of them and the group.

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


def _list_contents(symmetry: Symmetry) -> dict[str, Any]:
    return {
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
        "unread": [f"{key}[{axis}]" for key, axis in symmetry.unread],
    }
