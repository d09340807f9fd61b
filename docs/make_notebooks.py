"""Make Jupyter notebooks of pages: the same text, the same code in the same order, which the tests run.

python -m docs.make_notebooks FOLDER [--run]

With ``--run``, which ``make notebooks`` gives, each runs top to bottom in a Jupyter kernel and keeps its outputs. One that
fails or takes more than two minutes is an error.
"""

import argparse
import json
import re
import time
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = ("tutorial", "howto/merge-transformers", "howto/custom-objectives")
"""Merge two networks; a pair of transformers; an objective of one's own."""
MAX_SECONDS = 120
VERSION = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
REPOSITORY = f"https://github.com/onebasin/onebasin/blob/v{VERSION}"
"""Files as they were at the tag of this version: a page of an old version leads to old files."""
_BLOCK = re.compile(r"```python\n(.*?)```\n+(?:```text\n.*?```\n)?", flags=re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def make_notebook(page: Path) -> dict[str, object]:
    """A page as a notebook: a code cell for each block of Python, text between them, without what the blocks print."""
    text = re.sub(r"<!--.*?-->\n", "", page.read_text(encoding="utf-8"))
    cells, end = [], 0
    for match in _BLOCK.finditer(text):
        cells += [_make_cell("markdown", _lead_out(page, text[end : match.start()])), _make_cell("code", match[1])]
        end = match.end()
    cells.append(_make_cell("markdown", _lead_out(page, text[end:])))
    cells = [cell for cell in cells if cell["source"]]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def _make_cell(kind: str, text: str) -> dict[str, object]:
    extra = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.strip().splitlines(keepends=True), **extra}


def _lead_out(page: Path, text: str) -> str:
    """Links to other files lead to the repository, pictures to their content."""

    def replace(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        place = (page.parent / target).resolve().relative_to(DOCS.parent.resolve()).as_posix()
        raw = "?raw=true" if place.endswith((".svg", ".png")) else ""
        return f"]({REPOSITORY}/{place}{raw}{'#' + anchor if anchor else ''})"

    return _LINK.sub(replace, text)


def write_notebooks(folder: Path) -> list[Path]:
    """Write all of them; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in PAGES:
        file = folder / f"{Path(name).name}.ipynb"
        file.write_text(json.dumps(make_notebook(DOCS / f"{name}.md"), indent=1) + "\n", encoding="utf-8")
        files.append(file)
    return files


def run_notebook(file: Path) -> float:
    """Run a notebook in its folder, write it again with its outputs, and return the seconds that it took."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(file, as_version=4)
    begin = time.perf_counter()
    NotebookClient(notebook, timeout=MAX_SECONDS, resources={"metadata": {"path": str(file.parent)}}).execute()
    nbformat.write(notebook, file)
    return time.perf_counter() - begin


def main() -> None:
    """Write them into the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="store_true", help="run them; needs nbclient and ipykernel")
    options = parser.parse_args()
    for file in write_notebooks(options.folder):
        seconds = run_notebook(file) if options.run else 0.0
        print(f"{file}: {seconds:.0f} s" if options.run else file, flush=True)
        if seconds > MAX_SECONDS:
            raise SystemExit(f"{file} took more than {MAX_SECONDS} s")


if __name__ == "__main__":
    main()
