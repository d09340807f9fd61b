"""A model card: the README.md of a folder, which says what a model was made from and how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_FRONT_MATTER = re.compile(rb"\A(?:\xef\xbb\xbf)?---[ \t]*\r?\n.*?^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
"""What the Hugging Face hub reads from a card: YAML between two lines of dashes, at the very beginning."""

MARK = "<!-- This file was written by onebasin, which may replace it. -->"
"""In every card, so that a text of the user is not taken for one."""


@dataclass(frozen=True)
class Ingredient:
    """A model that another was made from.

    Attributes:
        name: its file or folder, as the user named it.
        role: what was done with it.
        hashes: the SHA-256 of each of its weight files.
    """

    name: str
    role: str
    hashes: Mapping[str, str]


@dataclass(frozen=True)
class ModelCard:
    """What a card says.

    Attributes:
        title: the heading.
        summary: what the model is, in a sentence or two.
        ingredients: what it was made from.
        command: that made it, as one would type it again.
        facts: further values by name.
        recipe: the text of the recipe, if there was one.
        tags: for the hub, if the card that it goes in front of has no such entries.
    """

    title: str
    summary: str
    ingredients: Sequence[Ingredient]
    command: str
    facts: Mapping[str, str] = field(default_factory=dict)
    recipe: str = ""
    tags: Sequence[str] = ("onebasin",)


def put_in_front(card: ModelCard, text: bytes) -> bytes:
    """A README.md that begins with a card, followed by the whole text that was there before.

    Entries for the Hugging Face hub stay at the very beginning, where it looks for them.
    """
    match = _FRONT_MATTER.match(text)
    head = match[0] if match else "\n".join(["---", "tags:", *(f"- {tag}" for tag in card.tags), "---", ""]).encode()
    rest = text[len(match[0]) :] if match else text
    middle = f"\n{render_card(card)}".encode()
    return head + middle + (b"\n---\n\n" + rest.lstrip(b"\r\n") if rest.strip() else b"")


def render_card(card: ModelCard) -> str:
    """The card as Markdown. Names are shown as they are, whatever characters are in them."""
    rows = [f"| {_code(each.name)} | {_cell(each.role)} | {_list_hashes(each.hashes)} |" for each in card.ingredients]
    facts = [f"- {_cell(name)}: {_cell(value)}" for name, value in card.facts.items()]
    parts = [
        MARK,
        f"# {_cell(card.title)}",
        _cell(card.summary),
        "\n".join(["| model | role | SHA-256 of its files |", "|---|---|---|", *rows]),
        _block("console", f"$ {card.command}"),
        *([f"The recipe:\n\n{_block('yaml', card.recipe.rstrip())}"] if card.recipe else []),
        *(["\n".join(facts)] if facts else []),
    ]
    return "\n\n".join(parts) + "\n"


def _list_hashes(hashes: Mapping[str, str]) -> str:
    return "<br>".join(f"{_code(name)} {_code(value)}" for name, value in hashes.items())


def _block(language: str, text: str) -> str:
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _code(text: str) -> str:
    """Text in a cell of a table as code; the fence is longer than any in it."""
    plain = _visible(text).replace("|", "\\|")
    fence = "`" * (_longest_run(plain) + 1)
    return f"{fence} {plain} {fence}" if "`" in plain else f"`{plain}`"


def _cell(text: str) -> str:
    """Text on one line in which no character is markup."""
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", _visible(text))


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
