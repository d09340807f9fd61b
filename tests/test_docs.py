"""The pages that are made by scripts are up to date."""

import json
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest

import onebasin

DOCS = Path(__file__).parent.parent / "docs"
API = runpy.run_path(str(DOCS / "make_api.py"))
NOTEBOOKS = runpy.run_path(str(DOCS / "make_notebooks.py"))


def test_the_reference_is_what_the_docstrings_say():
    assert (DOCS / "api.md").read_text(encoding="utf-8") == API["render"](), "run python -m docs.make_api"


@pytest.mark.parametrize("package", [onebasin, onebasin.continual])
def test_every_public_name_is_in_the_reference(package):
    listed = [name for modules in API["SECTIONS"].values() for name in modules.get(package.__name__, [])]
    assert sorted(listed) == sorted(n for n in package.__all__ if not isinstance(getattr(package, n), ModuleType))


def test_pictures_are_shown_and_those_of_the_gallery_have_a_record():
    pictures = {file.name for file in (DOCS / "pictures").iterdir()}
    shown = {
        name for page in DOCS.rglob("*.md") for name in re.findall(r"pictures/([\w.-]+)", page.read_text(encoding="utf-8"))
    }
    assert pictures == shown
    record = json.loads((DOCS / "pictures" / "record.json").read_text())
    assert {f"{name}.svg" for name in record if name != "report"} == {n for n in pictures if n.endswith(".svg")} - {
        "tutorial.svg"
    }
    assert all(entry["commit"] and entry["numbers"] for entry in record.values())


def test_a_page_is_filled_with_what_its_code_prints(tmp_path):
    run_page = runpy.run_path(str(DOCS / "run_page.py"))["run_page"]
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 6 * 7\nprint(x)\n```\n\n```text\nold\n```\n\n```python\nprint(x + 1)\n```\n\nend\n")
    assert run_page(page) == page.read_text().replace("old", "42")


@pytest.mark.parametrize("name", NOTEBOOKS["PAGES"])
def test_a_notebook_has_the_code_of_its_page(name):
    page = DOCS / f"{name}.md"
    notebook = NOTEBOOKS["make_notebook"](page)
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert code == [block.strip() for block in blocks]
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    text = "".join(line for cell in notebook["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
    assert "```text" not in text
    for place in re.findall(rf"\]\({NOTEBOOKS['REPOSITORY']}/([^)#?]+)", text):
        assert (DOCS.parent / place).exists()
    assert not re.search(r"\]\((?!http|#)", text)
