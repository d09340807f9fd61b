import pytest


@pytest.mark.parametrize("columns", ["40", "80", "120"])
def test_help_shows_the_way(onebasin, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    top = onebasin("--help").out
    for command in ("inspect", "align", "merge", "barrier", "apply", "canonical", "verify", "demo"):
        assert command in top
        page = onebasin(command, "--help")
        assert page.code == 0
        assert "--help" in page.out
    assert "Exit codes" in top


def test_without_arguments_help_is_shown(onebasin):
    ran = onebasin()
    assert "Usage: onebasin" in ran.out + ran.err


@pytest.mark.parametrize("command", [(), ("align",), ("merge",)])
def test_without_arguments_there_is_help_and_a_sentence(onebasin, command):
    ran = onebasin(*command)
    assert ran.code == 2
    assert ran.err.strip().splitlines()[-1] == f"error: {' '.join(('onebasin', *command))} needs arguments"


def test_version(onebasin):
    assert onebasin("--version").out.startswith("onebasin")
