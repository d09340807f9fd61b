"""``onebasin demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onebasin.cli import digits_demo, options


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures.")] = Path("demo-output"),
    seed: options.Seed = 0,
) -> None:
    """Train two small networks on embedded digits, align them by each method, draw the curves. No download."""
    digits_demo.run(out, seed)
