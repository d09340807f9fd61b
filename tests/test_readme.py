"""The code blocks of the README and the docs are run, in order and in one namespace per page, and their links followed.

A block of text right after a block of Python is what it prints. Machines round differently, so numbers are not compared, nor
is white space. A page that needs a library which is not ours to need says so: ``<!-- needs: name -->``.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onebasin.tracing.rules import RULES

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "docs" / "reference"  # by `make docs`, for the site alone
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if GENERATED not in page.parents]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCKS = re.compile(r"```python\n(.*?)```\n+(?:```text\n(.*?)```)?", flags=re.DOTALL)


REPOSITORY = r"https://(?:github\.com/onebasin/onebasin/blob|raw\.githubusercontent\.com/onebasin/onebasin)/main"
"""How the README, which reads on PyPI too, begins a link to a file of ours."""


def shape_of(text: str) -> list[str]:
    return re.sub(r"-?\d[\d.,e+-]*", "#", re.sub(r"-{3,}", "---", text)).split()


@pytest.fixture
def rules():
    """A page may add rules; the next one starts with ours."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_code_blocks_run(page, tmp_path, monkeypatch, capsys):
    text = page.read_text(encoding="utf-8")
    for library in re.findall(r"<!-- needs: (\w+) -->", text):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict = {}
    for block, printed in BLOCKS.findall(text):
        capsys.readouterr()
        exec(compile(block, str(page), "exec"), namespace)
        if printed:
            assert shape_of(capsys.readouterr().out) == shape_of(printed)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(rf"\({REPOSITORY}/", f"({'../' * len(page.relative_to(ROOT).parent.parts)}", text)
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


COMMANDS = re.findall(r"^\$ (onebasin .+)$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """The folder in which the README's commands are meant to run."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    folder = tmp_path_factory.mktemp("readme")
    for name in ("llama-a", "llama-b"):
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("line", COMMANDS, ids=[" ".join(line.split()[:2]) for line in COMMANDS])
def test_a_command_of_the_readme_runs_as_it_is_written(line, llamas):
    """In a shell, by the command that this environment has, and on the torchvision that it has."""
    pytest.importorskip("typer")
    pytest.importorskip("torchvision")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=llamas, env={**os.environ, "PATH": path})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    written = re.findall(r"(?:-o|--report) (\S+)", line)
    assert all((llamas / name).exists() for name in written)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings)
    return {heading.strip().lower().replace(" ", "-") for heading in plain}


def test_every_page_is_on_the_map():
    """From the README to the index, and from the index to every page."""
    assert "docs/index.md" in (ROOT / "README.md").read_text(encoding="utf-8")
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / t).resolve() for t in re.findall(r"\]\(([^)#]+\.md)", index.read_text(encoding="utf-8"))}
    assert {page for page in DOCS if page != index} <= linked


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_console_lines_have_commands_and_options_that_exist(page):
    main = pytest.importorskip("typer.main")
    from onebasin.cli.app import app

    commands = main.get_command(app).commands
    for line in re.findall(r"^\$ onebasin (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        words = shlex.split(line, comments=True)
        if words[0] == "--help":
            continue
        assert words[0] in commands, line
        known = {
            option for parameter in commands[words[0]].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words[1:] if re.match(r"--?[a-z]", word)} <= known, line
