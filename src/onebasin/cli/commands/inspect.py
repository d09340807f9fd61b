"""``onebasin inspect``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import onebasin as ob
from onebasin.checkpoints import Architecture, Checkpoint, find_architecture, open_checkpoint, open_models
from onebasin.cli import options
from onebasin.cli.console import Output, escape_controls
from onebasin.symmetries import Place, Power, Symmetry
from onebasin.symmetries.describe import merge_layers, pin_reasons, places, star_layer, summarise
from onebasin.symmetries.layout import write
from onebasin.symmetries.transform import load_element

_SHOWN = 4


def inspect(
    architecture: Annotated[
        str,
        typer.Argument(
            metavar="ARCHITECTURE",
            help="package.module:factory, torchvision:NAME, timm:NAME, a Hugging Face folder, or a saved permutation or "
            "transform.",
        ),
    ],
    input_shape: options.InputShape = None,
    check: options.Check = None,
    kinds: options.Kinds = "permutation",
    everything: Annotated[bool, typer.Option("--all", help="Show every layer by itself, with all axes.")] = False,
    json: options.Json = False,
) -> None:
    """Show which units of a model can be permuted: groups, the axes they move, and why other axes cannot.

    With --symmetry all gains of norms are folded first, those of the weights in a Hugging Face folder if it has any.
    """
    output = Output(json)
    notes: list[str] = []
    if Path(architecture).is_file() and Path(architecture).name != "config.json":
        element = load_element(architecture)
        symmetry = element.symmetry
        output.show(repr(element))
    else:
        weights = _open_weights(Path(architecture))
        found = find_architecture(architecture, input_shape or (), tensors=None if weights is None else weights.shapes)
        notes += found.notes
        if kinds == "all":
            symmetry, more = _trace_canonical(found, weights, input_shape or (), check)
            notes += more
        else:
            symmetry = found.symmetry(check, kinds)
    for note in notes:
        output.note(note)
    if everything:
        output.show(Text(str(symmetry)))
    else:
        _show(output, symmetry)
    output.finish({"command": "inspect", "model": architecture, **_list_contents(symmetry), "notes": notes})


def _open_weights(path: Path) -> Checkpoint | None:
    """The weights in a folder; None if there are none, or they cannot be read: an architecture can be shown without them."""
    try:
        return open_checkpoint(path) if path.is_dir() else None
    except (ValueError, OSError):
        return None


def _trace_canonical(
    architecture: Architecture, weights: Checkpoint | None, shapes: Sequence[str], check: bool | None
) -> tuple[Symmetry, list[str]]:
    """The symmetry of all kinds where gains are folded, with the weights of a folder if there are any; and what was done."""
    if weights is not None:
        (model,) = open_models([weights], architecture.name, shapes, verify=False).load()
    else:
        model = architecture.build()
    form = ob.canonical(model, architecture.example_inputs)
    symmetry = architecture.symmetry(check, "all", form.model)
    notes = [f"{len(form.folded)} gains of norms were folded"] if form.folded else []
    notes += [f"the gain {key} stays: {reason}" for key, reason in form.left.items()]
    if symmetry.fixed and weights is None:
        notes.append(
            "this is for gains of one, as the model starts: in a checkpoint, those that cannot be folded leave less"
        )
    return symmetry, notes


def _show(output: Output, symmetry: Symmetry) -> None:
    output.show(Text(symmetry.summary(), style="bold"))
    table = _table("group", "units", "axes it moves")
    for name, count, group, axes in summarise(symmetry):
        title = f"{name} x{count}" if count > 1 else name
        each = f" in each {', '.join(p.rpartition('.')[2] for p in group.parents)}" if group.parents else ""
        table.add_row(escape_controls(title), escape_controls(f"{group.size}{each}"), _shorten(_relative(axes, name)))
    output.show(table)
    scales = [(scale.name, "positive", _list_axes(scale.powers)) for scale in symmetry.scales.values()]
    bases = [(basis.name, basis.kind, _list_axes(basis.places)) for basis in symmetry.bases.values()]
    for title, rows in (("scale", scales), ("basis", bases)):
        changes = _table(title, "kind", "axes it multiplies")
        for name, kind, axes in _merge_rows(rows):
            changes.add_row(escape_controls(name), kind, _shorten(_relative(axes, name)))
        if rows:
            output.show(changes)
    reasons = pin_reasons(symmetry, modules=False)
    if reasons:
        pins = _table("not free", "because")
        for why, axes in reasons.items():
            pins.add_row(_shorten(merge_layers(axes)), escape_controls(why))
        output.show(pins)
    if symmetry.unreached:
        output.show(f"never used by these inputs, left alone: {', '.join(merge_layers(symmetry.unreached))}")


def _merge_rows(rows: Iterable[tuple[str, str, list[str]]]) -> Iterator[tuple[str, str, list[str]]]:
    """Rows of a name, a kind and axes: those that differ only in the numbers of their layers as one, with their count.

    >>> rows = [(f"h.{n}.up", "linear", [f"h.{n}.up[0]", f"h.{n}.down[1]"]) for n in range(3)]
    >>> list(_merge_rows(rows))
    [('h.*.up x3', 'linear', ['h.*.up[0]', 'h.*.down[1]'])]
    """
    alike: dict[Any, list[tuple[str, list[str]]]] = {}
    for name, kind, axes in rows:
        alike.setdefault((star_layer(name), kind, *map(star_layer, axes)), []).append((name, axes))
    for (star, kind, *starred), found in alike.items():
        if len(found) > 1:
            yield f"{star} x{len(found)}", kind, starred
        else:
            yield found[0][0], kind, merge_layers(found[0][1])


def _list_axes(entries: Mapping[str, tuple[Power, ...] | tuple[Place, ...]]) -> list[str]:
    return [f"{key}[{entry.axis}]" for key, found in entries.items() for entry in found]


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
    return "\n".join([*map(escape_controls, entries[:_SHOWN]), *more])


def _list_contents(symmetry: Symmetry) -> dict[str, Any]:
    return {
        "summary": symmetry.summary(),
        "num_hidden": symmetry.num_hidden,
        "num_free": symmetry.num_free,
        "groups": {
            name: {"size": group.size, "parents": group.parents, "kind": group.kind, "axes": places(symmetry, name)}
            for name, group in symmetry.groups.items()
        },
        "layouts": {key: write(layout) for key, layout in symmetry.layouts.items()},
        "pinned": pin_reasons(symmetry),
        "scales": {
            scale.name: {"group": scale.group, "powers": _as_lists(scale.powers), "offsets": scale.offsets}
            for scale in symmetry.scales.values()
        },
        "bases": {
            basis.name: {
                "group": basis.group,
                "kind": basis.kind,
                "parents": basis.parents,
                "places": _as_lists(basis.places),
            }
            for basis in symmetry.bases.values()
        },
        "fixed": symmetry.fixed,
        "ties": symmetry.ties,
        "unreached": symmetry.unreached,
        "unread": [f"{key}[{axis}]" for key, axis in symmetry.unread],
    }


def _as_lists(entries: Mapping[str, tuple[Power, ...] | tuple[Place, ...]]) -> dict[str, list[dict[str, Any]]]:
    return {key: [entry._asdict() for entry in found] for key, found in entries.items()}
