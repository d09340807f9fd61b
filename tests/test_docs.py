"""The pages that are made by scripts are up to date."""

import ast
import builtins
import doctest
import importlib
import inspect
import json
import re
import runpy
from collections import Counter
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


PUBLIC = [(module, name) for modules in API["SECTIONS"].values() for module, names in modules.items() for name in names]


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_every_public_object_has_an_example(module, name):
    """`test_doctests` runs it."""
    described = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    assert (">>> " in described) == (name != "UnreachedWarning")


def find_examples():
    """The docstrings with examples of all public objects and of their members."""
    for module, name in PUBLIC:
        thing = getattr(importlib.import_module(module), name)
        yield name, thing
        if inspect.isclass(thing):
            members = ((key, inspect.unwrap(getattr(value, "__func__", value))) for key, value in vars(thing).items())
            yield from ((f"{name}.{key}", value) for key, value in members if not key.startswith("_"))


EXAMPLES = {name: text for name, thing in find_examples() if ">>> " in (text := inspect.getdoc(thing) or "")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_alone(name):
    """With what it imports itself, as a reader of its page pastes it."""
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name], {}, name, None, 0)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert result.failed == 0, "".join(said)


def test_pictures_are_shown_and_come_from_code_or_have_a_record():
    pictures = {file.name for file in (DOCS / "pictures").iterdir()}
    pages = [page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")]
    assert pictures == {name for page in pages for name in re.findall(r"pictures/([\w.-]+)", page)}
    record = json.loads((DOCS / "pictures" / "record.json").read_text())
    recorded = {f"{name}.svg" for name in record if name != "report"}
    drawn = {name for page in pages for name in re.findall(r'savefig\("([\w.-]+)"\)', page)}
    assert not recorded & drawn
    assert recorded | drawn == {name for name in pictures if name.endswith(".svg")}
    assert all(entry["commit"] and entry["numbers"] for entry in record.values())


def test_pages_quote_the_coverage_that_was_recorded():
    """`make coverage` writes its own page; these two quote it."""
    records = json.loads((DOCS / "coverage.json").read_text(encoding="utf-8"))["records"]
    verdicts = Counter(record["verdict"] for record in records if record["verdict"] != "not made")
    others = sum(verdicts.values()) - verdicts["right"] - verdicts["refused"]
    assert not verdicts.keys() - {"right", "refused", "not checked", "not finished"}
    for page in (DOCS / "symmetry.md", DOCS.parent / "README.md"):
        text = page.read_text(encoding="utf-8")
        for quoted in (f"{sum(verdicts.values())} real", f"{verdicts['right']} are", f"{verdicts['refused']} are refused"):
            assert quoted in text, f"{page.name} should say: {quoted}"
        assert not others or f"{others} were not" in text, f"{page.name} should say: {others} were not checked to the end"


def test_the_page_on_symmetry_quotes_the_kinds_that_were_recorded():
    records = json.loads((DOCS / "coverage.json").read_text(encoding="utf-8"))["records"]
    found = [each["all"] for record in records for each in (record, record.get("single", {})) if "all" in each]
    assert not {each["verdict"] for each in found} - {"right", "refused", "not checked"}
    whole = [record["all"] for record in records if "all" in record]
    right = [each for each in whole if each["verdict"] == "right"]
    maps = sum("linear" in each["bases"] for each in right)
    rotations = sum(not {"orthogonal", "centred"}.isdisjoint(each["bases"]) for each in right)
    scaled = sum(bool(each["scales"]) for each in right)
    quoted = (
        f"each of {len(whole)} architectures: of {len(right)} that are right {maps} have invertible maps, {rotations} "
        f"rotations, and {scaled} positive scales."
    )
    assert quoted in (DOCS / "symmetry.md").read_text(encoding="utf-8"), quoted


BEGINNING, *USES = re.findall(r"```python\n(.*?)```", (DOCS / "gallery.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def names_of(code: str) -> tuple[set[str], set[str]]:
    """The names that a script gives a meaning, in functions too, and those that it uses."""
    tree = ast.walk(ast.parse(code))
    bound, used = set(dir(builtins)), set()
    for node in tree:
        match node:
            case ast.Name(name, ast.Load()):
                used.add(name)
            case ast.Name(name) | ast.arg(name) | ast.FunctionDef(name) | ast.ClassDef(name):
                bound.add(name)
            case ast.alias(name, other):
                bound.add(other or name)
    return bound, used


@pytest.mark.parametrize("use", USES, ids=[re.findall(r'savefig\("(\w+)', use)[0] for use in USES])
def test_a_use_of_the_gallery_is_short_and_needs_no_other(use):
    assert sum(bool(line.strip()) for line in use.splitlines()) < 20
    bound, used = names_of(use)
    assert used <= bound | names_of(BEGINNING)[0]


def test_a_page_is_filled_with_what_its_code_prints(tmp_path):
    run_page = runpy.run_path(str(DOCS / "run_page.py"))["run_page"]
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 6 * 7\nprint(x)\n```\n\n```text\nold\n```\n\n```python\nprint(x + 1)\n```\n\nend\n")
    assert run_page(page) == page.read_text().replace("old", "42")


def test_versions_of_the_site_are_listed_newest_first(tmp_path):
    list_versions = runpy.run_path(str(DOCS / "list_versions.py"))["list_versions"]
    for name in ("0.9.0", "0.10.1", "1.0.0rc1", "_static"):
        (tmp_path / name).mkdir()
    list_versions(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert listed == {"latest": "0.10.1", "versions": ["1.0.0rc1", "0.10.1", "0.9.0"]}
    (tmp_path / "1.0.0").mkdir()
    list_versions(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert listed == {"latest": "1.0.0", "versions": ["1.0.0", "1.0.0rc1", "0.10.1", "0.9.0"]}
    assert 'url=1.0.0/index.html"' in (tmp_path / "index.html").read_text()


def test_dead_links_of_a_site_are_found(tmp_path):
    find_dead_links = runpy.run_path(str(DOCS / "check_links.py"))["find_dead_links"]
    site = tmp_path / "1.0.0"
    (site / "pictures").mkdir(parents=True)
    (site / "pictures" / "a.svg").touch()
    links = ["b.html#there", "#here", "pictures/a.svg", "../", "https://example.org/nowhere"]
    dead = ["b.html#missing", "c.html", "#gone", "pictures/b.svg", "../2.0.0/index.html"]
    (site / "a.html").write_text("".join(f'<a href="{link}"></a><p id="here">' for link in links + dead))
    (site / "b.html").write_text('<p id="there"><img src="pictures/a.svg"></p>')
    assert sorted(find_dead_links(site)) == sorted(f"a.html: {link}" for link in dead)


def test_a_site_without_a_version_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"such as 1\.0\.0"):
        runpy.run_path(str(DOCS / "list_versions.py"))["list_versions"](tmp_path)


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


def test_what_the_reference_leaves_out_exists():
    for name in API["INTERNAL"]:
        owner, _, member = name.partition(".")
        assert hasattr(getattr(onebasin, owner, None) or getattr(onebasin.tensors, owner), member), name
