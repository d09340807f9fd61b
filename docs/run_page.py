"""Run the code of pages and write what it prints, and the pictures it draws, into them.

python -m docs.run_page docs/tutorial.md

The Python blocks of a page run in order, in one namespace and a folder of their own. A text block right after one is
replaced by what that block printed; a picture that the page shows and the code has drawn is copied to docs/pictures.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shutil
import tempfile
from pathlib import Path

import matplotlib
import torch

from onebasin.cli.torchvision_operators import declare_missing_operators

PICTURES = Path(__file__).parent / "pictures"
BLOCKS = re.compile(r"(```python\n(.*?)```\n+)(```text\n.*?```)?", flags=re.DOTALL)


def run_page(page: Path) -> str:
    """The text of a page with the outputs of its code; copies the pictures."""
    namespace: dict = {}
    torch.manual_seed(0)

    def run(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match[2], str(page), "exec"), namespace)
        return match[1] + (f"```text\n{printed.getvalue().strip()}\n```" if match[3] else "")

    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        text = BLOCKS.sub(run, text)
        for drawn in re.findall(r"\(\S*pictures/(\S+?)\)", text):
            if Path(drawn).exists():
                shutil.copyfile(drawn, PICTURES / drawn)
    return text


def main() -> None:
    """Run the pages that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    declare_missing_operators()  # for a torchvision that was built for another torch, which transformers imports
    # The same run gives the same file, date and ids included.
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "onebasin"
    for page in parser.parse_args().pages:
        needed = re.findall(r"<!-- needs: (\w+) -->", page.read_text(encoding="utf-8"))
        missing = [library for library in needed if importlib.util.find_spec(library) is None]
        if missing:
            print(f"{page} is left as it is: it needs {', '.join(missing)}")
            continue
        page = page.resolve()
        page.write_text(run_page(page), encoding="utf-8")


if __name__ == "__main__":
    main()
