"""The page of the coverage table: a summary, what is not as it should be, then every row."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]

SECONDS = 10.0
"""What no architecture should take."""
HEADER = ["architecture", "parameters (M)", "seconds", "groups", "free", "right at other", "error", "verdict"]
HEADER += ["scales and bases", "at a single token", "without verification", "pinned, and why"]


def row(record: Record) -> list[str]:
    """The cells of one architecture."""
    return [
        record["name"],
        f"{record['parameters'] / 1e6:.2f}" if "parameters" in record else "",
        f"{record['seconds']:.1f}" if "seconds" in record else "",
        _groups(record),
        _percent(record),
        ", ".join(dict.fromkeys(record.get("checked", ()))),
        _error(record),
        _verdict(record),
        _kinds_found(record),
        _single(record),
        _unverified(record),
        "; ".join(_short(text) for text in record.get("pinned", ())[:3]),
    ]


def _groups(record: Record) -> str:
    if "groups" not in record:
        return ""
    counted = record["counted"]
    match = "" if counted is None else " =" if counted == record["groups"] else f" != {counted}"
    return str(record["groups"]) + (f" ({record['nested']} nested)" if record["nested"] else "") + match


def share(record: Record) -> float | None:
    """Of hidden units, those that are free."""
    return record["free"] / record["hidden"] if record.get("hidden") else None


def _percent(record: Record) -> str:
    value = share(record)
    return "" if value is None else f"{value:.1%}"


def _error(record: Record) -> str:
    return "" if record.get("error") is None else f"{record['error']:.0e}"


def _verdict(record: Record) -> str:
    return record["verdict"] + (f": {_short(record['why'], 200)}" if "why" in record else "")


def _kinds_found(record: Record) -> str:
    """How many scales and bases of each kind, or why none."""
    found = record.get("all")
    if found is None:
        return ""
    counts = [f"{number} {kind}" for kind, number in sorted(found.get("bases", {}).items())]
    counts += [f"{found['scales']} scales"] if found.get("scales") else []
    text = ", ".join(counts) or ("none" if "bases" in found else "")
    return text if found["verdict"] == "right" else f"{text} {_verdict(found)}".strip()


def _single(record: Record) -> str:
    single = record.get("single")
    if single is None:
        return ""
    found = single.get("all", {"verdict": "right"})
    kinds = "" if found["verdict"] == "right" else f"; all kinds {_verdict(found)}"
    return f"{_verdict(single)} {_percent(single)}".strip() + kinds


def is_wrong(record: Record) -> bool:
    """Whether a check found another function, of permutations or of all kinds, at a single token or not."""
    single = record.get("single", {})
    return any(found.get("verdict") == "WRONG" for found in (record, single, record.get("all", {}), single.get("all", {})))


def _unverified(record: Record) -> str:
    """What the walk alone finds, where that is something else."""
    parts = [("", record.get("unverified")), ("single token: ", record.get("single", {}).get("unverified"))]
    return "; ".join(where + _verdict(found) for where, found in parts if found)


def _short(text: str, length: int = 90) -> str:
    text = text.replace("the rule does not cover this use: ", "not covered: ")
    return text if len(text) <= length else text[: length - 3] + "..."


def cells(values: Iterable[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(value.replace("|", "/").replace("\n", " ") for value in values) + " |"


def summary(records: list[Record]) -> str:
    """Verdicts, shares and times, one line each."""
    made = [r for r in records if r["verdict"] != "not made"]
    num_wrong = sum(map(is_wrong, made))
    verdicts = _count(r["verdict"] for r in made)
    lines = [
        f"- {num_wrong or 'None'} of {len(made)} architectures {'were' if num_wrong > 1 else 'was'} found wrong: {verdicts}."
    ]
    singles = [r["single"] for r in made if "single" in r]
    if singles:
        verdicts = _count(r["verdict"] for r in singles)
        lines.append(f"- {len(singles)} text models traced at a single token, checked at nine: {verdicts}.")
    lines += _describe_kinds(made, "")
    lines += _describe_kinds(singles, ", traced at a single token and checked at nine")
    walked = [r["unverified"] for r in [*made, *singles] if "unverified" in r]
    lines.append(
        f"- With `verify=False` another symmetry is found in {len(walked)}: {_count(r['verdict'] for r in walked) or 0}."
    )
    lines += [f"- {line}" for name, rows in _kinds(made) if (line := _describe_shares(name, rows))]
    timed = sorted((r for r in made if "seconds" in r), key=lambda r: -r["seconds"])
    if timed:
        slowest = ", ".join(f"{r['name']} {r['seconds']:.1f} s" for r in timed[:5])
        lines.append(f"- Over {SECONDS:.0f} s: {sum(r['seconds'] > SECONDS for r in timed)}. The slowest: {slowest}.")
    counted = [r for r in made if r["counted"] is not None]
    matching = sum(r["counted"] == r.get("groups") for r in counted)
    if counted:
        lines.append(f"- Groups counted by hand for {len(counted)}, {matching} match.")
    if len(records) > len(made):
        lines.append(f"- {len(records) - len(made)} more could not be made from a tiny configuration.")
    return "\n".join(lines)


def _describe_kinds(records: list[Record], where: str) -> list[str]:
    found = [r["all"] for r in records if "all" in r]
    if not found:
        return []
    line = f"- All kinds of symmetry{where}, in {len(found)} of {len(records)}: {_count(r['verdict'] for r in found)}."
    right = [r for r in found if r["verdict"] == "right"]
    kinds = sorted({kind for r in right for kind in r["bases"]})
    counts = [f"{sum(kind in r['bases'] for r in right)} have `{kind}` bases" for kind in kinds]
    counts += [f"{sum(bool(r['scales']) for r in right)} positive scales"]
    return [line if where else f"{line} Of the right ones {', '.join(counts)}."]


def _count(verdicts: Iterable[str]) -> str:
    return ", ".join(f"{number} {verdict}" for verdict, number in Counter(verdicts).most_common())


def _kinds(records: list[Record]) -> list[tuple[str, list[Record]]]:
    kinds = sorted({r.get("kind", "") for r in records} - {""})
    return [("all", records), *((kind, [r for r in records if r.get("kind") == kind]) for kind in kinds)]


def _describe_shares(name: str, records: list[Record]) -> str:
    shares = [value for r in records if (value := share(r)) is not None]
    if not shares:
        return ""
    whole = sum(value == 1 for value in shares)
    return (
        f"Free hidden units, {name} ({len(shares)}): median {statistics.median(shares):.1%}, least {min(shares):.1%}, "
        f"all of them in {whole}, at least 95 % in {sum(value >= 0.95 for value in shares)}."
    )


def markdown(records: list[Record], command: str, machine: str, untried: list[str]) -> str:
    """The page of the documentation, with the names of architectures that the run has not come to."""
    made = [r for r in records if r["verdict"] != "not made"]
    counts = Counter(r["commit"] for r in made if "commit" in r).most_common()
    commits = ", ".join(f"{commit} ({count})" for commit, count in counts) or "not recorded"
    lines = [_INTRODUCTION.format(command=command, machine=machine, commits=commits, summary=summary(records))]
    for library in sorted({r["library"] for r in made}):
        rows = [r for r in made if r["library"] == library]
        peer = any("peer" in r for r in rows)
        header = [*HEADER, "`rebasin` 0.0.47"] if peer else HEADER
        lines += [f"## {library}", "", summary(rows), "", cells(header), cells(["---"] * len(header))]
        lines += [cells([*row(r), r.get("peer", "")] if peer else row(r)) for r in rows]
        lines.append("")
    if left := [r for r in records if r["verdict"] == "not made"]:
        lines += ["## Not made", "", _NOT_MADE, "", ", ".join(r["name"] for r in left) + ".", ""]
    if untried:
        lines += ["## Not tried", "", f"The run was ended before these {len(untried)}:", "", ", ".join(untried) + ".", ""]
    return "\n".join(lines)


_NOT_MADE = (
    "Types of model for which no tiny configuration or no inputs are known here: they need a download, another package or a "
    "composition of other models. They say nothing about tracing."
)

_INTRODUCTION = """\
# Coverage

How much of real architectures is found to be free, and whether that is right. The models have random weights.
Made by `{command}`, on {machine}; seconds are CPU time. Commits that rows were measured at, with their number: {commits}.

{summary}

The columns:

- *seconds*: the time of `onebasin.symmetry` with default settings, with its own verification.
- *groups*: the number of permutations; a family, with one permutation for each element of a parent, counts as one and is
  called nested. `=` says that a person counted the same number from the architecture. BEiT has fewer: the biases of its keys
  are zeros in a buffer outside of the state dict, which may be a state that is not set yet, so its heads stay fixed.
- *free*: the share of hidden units that can move. Hidden units are the output channels of weight operations that are not
  model outputs.
- *right at other*: a random permutation of random weights leaves every output unchanged also at other values of the inputs,
  batch sizes and lengths (tokens, frames, pixels per side) than those of the example, computed by the module itself in
  eval mode and float64. Sizes that the module does not take are left out.
- *error*: the largest relative difference at those inputs.
- *verdict*: `right` is an error below 1e-9. `WRONG` must not occur. `refused` is an error message of ours, `not finished`
  a process that was ended.
- *scales and bases*: what `kinds="all"` finds beside permutations ([changes of basis](symmetry.md#changes-of-basis)) in the
  network as it is made, its gains all one; random elements are checked at the same other inputs, by the module itself.
- *at a single token*: text models traced at one token and checked at nine, with the share of hidden units that is free then.
- *without verification*: if `verify=False` finds another symmetry, whether that one is right at the same inputs.
- *pinned*: axes of parameters that cannot move and are neither model input nor output, by reason.
- *`rebasin`*: the same check of that package, by `python -m benchmarks.peer_rebasin` in an environment of its own.

Three notes on rows:

- *DETR*: every layer of the encoder adds a table of sines and cosines, a constant, to the stream. So exchanging two units of
  that stream changes the function, and they are rightly pinned; with learned positions instead of the table they are free
  (the rows with that name). The rest belongs to the decoder: it starts from zeros, so its first layer has projections that
  are only ever multiplied by zeros, and conditional DETR multiplies units by sines of its own.
- *UNetMotionModel*: the example has fewer frames than the tables of positions in its state, and the module might make a
  table that is read in part again for longer videos. A table that is read as a whole moves like a parameter.
- *yolos*: its tiny configuration keeps the images of the default one, of 864 pixels per side, which are 11,765 tokens. Their
  attention takes more time or memory in float64 than a row has. With images of 32 pixels it is right, also at another size.
"""
