import io

import pytest

console = pytest.importorskip("onebasin.cli.console")


def test_one_bar_shows_each_part_of_the_work(monkeypatch):
    output, stream = console.Output(), io.StringIO()
    monkeypatch.setattr(output, "err", console.Console(file=stream, force_terminal=True, width=100))
    with output.progress() as progress:
        for what in ("descent", "writing", "descent"):
            progress(what, 1, 2)
            output.err.print(f"after {what}")
    shown = stream.getvalue().split("after ")
    assert all(what in part for what, part in zip(("descent", "writing", "descent"), shown[1:], strict=True))


def test_only_our_own_styles_steer_a_terminal():
    stream = io.StringIO()
    terminal = console.SafeConsole(file=stream, force_terminal=True, width=60, highlight=False, color_system="standard")
    table = console.Table("a\x1b[2Jb")
    table.add_row("c\x9bd\u202e")
    for content in (table, console.Text("e\x1b]0;title\x07", style="red"), "f\x1b[31m"):
        terminal.print(content)
    shown = stream.getvalue()
    for text in ("a\\x1b", "c\\x9b", "e\\x1b]0;title", "f\\x1b[31m"):
        assert text in shown
    assert "\x1b[31me" in shown  # the style
    assert not {"\x9b", "\x07", "\u202e"} & set(shown)
    assert "\x1b[2J" not in shown
    assert "\x1b]" not in shown


def test_controls_are_escaped():
    assert console.escape_controls("a\nb\tc", keep="\n") == "a\nb\\tc"
    assert console.escape_controls("naïve 模型 🙂 [bold] C:\\x") == "naïve 模型 🙂 [bold] C:\\x"
    assert console.escape_controls("\udcff") == "\\udcff"


def test_facts_have_a_line_for_each_entry(capsys):
    console.Output().show_facts({"one": ["a\nb", "c"], "two": "d\ne"})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["one", "a\\nb"], ["c"], ["two", "d"], ["e"]]
