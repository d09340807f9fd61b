"""Tables and figures of continual learning, from records alone."""

from pathlib import Path
from typing import Any


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """Placeholder."""
