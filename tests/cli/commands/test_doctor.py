import re
import tomllib
from pathlib import Path

import pytest

from onebasin.cli.commands import doctor as module
from onebasin.cli.commands.doctor import EXTRAS
from onebasin.cli.self_check import Check

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def checks(monkeypatch) -> list[Check]:
    """What the self-check, which takes seconds, is said to have found."""
    found = [Check("a planted permutation is found", True, "found", 0.1)]
    monkeypatch.setattr(module, "run_checks", lambda devices: iter(found))
    return found


def test_versions_devices_extras_and_checks_are_shown(onebasin, folder, checks):
    ran = onebasin("doctor")
    assert ran.code == 0
    assert all(word in ran.out for word in ("torch", "cpu:", "avalanche", "a planted permutation is found", "all is well"))


def test_the_record_has_the_same(onebasin, folder, checks):
    record = onebasin("doctor", "--json").record
    assert record["ok"] is True
    assert record["versions"]["torch"]
    assert record["extras"]["cli"]["present"] is True
    assert record["extras"]["plots"]["adds"]
    assert record["checks"][0]["passed"] is True


def test_a_check_that_failed_is_exit_code_1(onebasin, folder, checks):
    checks.append(Check("a report is drawn", False, "OSError: no space", 0.1))
    ran = onebasin("doctor")
    assert ran.code == 1
    assert "1 of 2 checks failed" in ran.out
    assert onebasin("doctor", "--json").record["ok"] is False


def test_a_check_that_was_left_out_is_no_failure(onebasin, folder, checks):
    checks.append(Check("a report is drawn", None, "left out", 0.0))
    assert onebasin("doctor").code == 0


def test_a_missing_library_is_named(onebasin, folder, checks, monkeypatch):
    monkeypatch.setitem(module.EXTRAS, "ray", module.Extra(("no-such-library",), "nothing"))
    assert onebasin("doctor", "--json").record["extras"]["ray"]["present"] is False
    assert "no no-such-library" in " ".join(onebasin("doctor").out.split())


def test_the_extras_are_those_of_the_package():
    """dev is for those who work on the package, docs for its site."""
    declared = {name: parts for name, parts in PROJECT["optional-dependencies"].items() if name not in ("dev", "docs")}
    libraries = {name: {re.split(r"[<>=\[]", part)[0] for part in parts} for name, parts in declared.items()}
    assert libraries == {name: set(extra.libraries) for name, extra in EXTRAS.items()}
