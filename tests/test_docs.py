"""The pages that are made by scripts are up to date."""

import runpy
from pathlib import Path

import onebasin

DOCS = Path(__file__).parent.parent / "docs"
API = runpy.run_path(str(DOCS / "make_api.py"))


def test_the_reference_is_what_the_docstrings_say():
    assert (DOCS / "api.md").read_text(encoding="utf-8") == API["render"](), "run python docs/make_api.py"


def test_every_public_name_is_in_the_reference():
    listed = [name for modules in API["SECTIONS"].values() for name in modules.get("onebasin", [])]
    assert sorted(listed) == sorted(onebasin.__all__)
