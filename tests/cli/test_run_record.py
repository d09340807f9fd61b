import hashlib
import re

from tests.cli.cli_files import MLP, write_llama


def sha256(file) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_reports_say_when_by_what_and_from_which_files(onebasin, folder):
    command = ("align", "a.safetensors", "b.pt", "-o", "c.pt", *MLP, "--seed", "7", "--report", "r.html")
    assert onebasin(*command).code == 0
    page = (folder / "r.html").read_text()
    assert re.search(r"<dt>date</dt><dd>20\d\d-\d\d-\d\d \d\d:\d\d UTC</dd>", page)
    assert re.search(r"<dt>versions</dt><dd>onebasin [\d.]+, Python 3\.\d+\.\d+, torch 2\.", page)
    assert "<dt>seed</dt><dd>7</dd>" in page
    for name in ("a.safetensors", "b.pt"):
        assert f"<dt>SHA-256 of {name}</dt><dd>{sha256(folder / name)}</dd>" in page
    assert "Distance by layer" in page
    assert "Distance by layer" in merge_report(onebasin, folder)


def merge_report(onebasin, folder) -> str:
    assert onebasin("merge", "a.safetensors", "b.pt", "-o", "m.pt", *MLP, "--report", "m.html").code == 0
    page = (folder / "m.html").read_text()
    assert sha256(folder / "b.pt") in page
    return page


def test_a_folder_gets_a_card_in_front_of_its_own_text(onebasin, folder):
    for seed, name in enumerate("ab"):
        write_llama(folder / name, seed)
    own = "---\nlicense: apache-2.0\n---\n# The first\n\nIts own text.\n"
    (folder / "a" / "README.md").write_text(own)
    (folder / "a" / "LICENSE").write_text("do what you like")
    (folder / "b" / "NOTICE.txt").write_text("of b")
    assert onebasin("merge", "a", "b", "-o", "m", "--method", "weight-matching").code == 0
    text = (folder / "m" / "README.md").read_text()
    assert text.startswith("---\nlicense: apache-2.0\n---\n")
    assert "\n# m\n" in text
    assert text.endswith("# The first\n\nIts own text.\n")
    assert "`onebasin merge" not in text
    assert "$ onebasin merge a b -o m --method weight-matching\n" in text
    for shard in (folder / "b").glob("*.safetensors"):
        assert f"`{shard.name}` `{sha256(shard)}`" in text
    assert (folder / "m" / "LICENSE").read_text() == "do what you like"
    assert (folder / "a" / "README.md").read_text() == own

    assert onebasin("align", "a", "b", "-o", "moved", "--method", "weight-matching").code == 0
    text = (folder / "moved" / "README.md").read_text()
    assert "b, aligned to a by onebasin" in text
    assert (folder / "moved" / "NOTICE.txt").read_text() == "of b"
    assert onebasin("align", "a", "b", "-o", "moved", "--method", "weight-matching", "--force").code == 0  # it is ours
    (folder / "moved" / "README.md").write_text("my notes")
    ran = onebasin("align", "a", "b", "-o", "moved", "--method", "weight-matching", "--force")
    assert ran.code == 3
    assert "README.md was not written by onebasin" in ran.err
    assert (folder / "moved" / "README.md").read_text() == "my notes"


def test_a_report_does_not_take_the_place_of_the_card(onebasin, folder):
    for seed, name in enumerate("ab"):
        write_llama(folder / name, seed)
    ran = onebasin("align", "a", "b", "-o", "m", "--report", "m/README.md")
    assert ran.code == 3
    assert "named twice" in ran.err
