"""The pages that are made by scripts are up to date."""

import runpy
from pathlib import Path
from types import ModuleType

import pytest

import onebasin

DOCS = Path(__file__).parent.parent / "docs"
API = runpy.run_path(str(DOCS / "make_api.py"))


def test_the_reference_is_what_the_docstrings_say():
    assert (DOCS / "api.md").read_text(encoding="utf-8") == API["render"](), "run python -m docs.make_api"


@pytest.mark.parametrize("package", [onebasin, onebasin.continual])
def test_every_public_name_is_in_the_reference(package):
    listed = [name for modules in API["SECTIONS"].values() for name in modules.get(package.__name__, [])]
    assert sorted(listed) == sorted(n for n in package.__all__ if not isinstance(getattr(package, n), ModuleType))
