from pathlib import Path


def test_demo(onebasin, folder, monkeypatch):
    called = []
    monkeypatch.setattr("onebasin.cli.digits_demo.run", lambda *arguments: called.append(arguments))
    assert onebasin("demo", "--seed", "4").code == 0
    assert called == [(Path("demo-output"), 4)]
