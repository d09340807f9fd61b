import io
import json

import pytest

console = pytest.importorskip("onebasin.cli.console")


def test_json_has_no_infinity(capsys):
    console.Output(as_json=True).finish({"a": float("inf"), "b": (1.5, float("nan")), "c": None})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None], "c": None}


def test_one_bar_shows_each_part_of_the_work(monkeypatch):
    output, stream = console.Output(), io.StringIO()
    monkeypatch.setattr(output, "err", console.Console(file=stream, force_terminal=True, width=100))
    with output.progress() as progress:
        for what in ("descent", "writing", "descent"):
            progress(what, 1, 2)
            output.err.print(f"after {what}")
    shown = stream.getvalue().split("after ")
    assert all(what in part for what, part in zip(("descent", "writing", "descent"), shown[1:], strict=True))
