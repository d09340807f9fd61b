"""What stands beside the code agrees with it: metadata, citation, workflows, the navigation of the site."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import onebasin

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def load_yaml(name: str):
    return pytest.importorskip("yaml").safe_load(read(name))


def test_nothing_is_tracked_that_is_ignored():
    """An environment or a build that slipped in, for example."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--ignored", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    assert listed.stdout == ""


def test_the_version_is_that_of_the_metadata():
    assert onebasin.__version__ == PROJECT["version"]


def test_the_citation_has_the_version_and_the_paper():
    citation = load_yaml("CITATION.cff")
    assert citation["version"] == PROJECT["version"]
    assert citation["preferred-citation"]["title"] == "Re-basin via implicit Sinkhorn differentiation"
    authors = [author["family-names"] for author in citation["preferred-citation"]["authors"]]
    assert authors == ["Guerrero Peña", "Medeiros", "Dubail", "Aminbeidokhti", "Granger", "Pedersoli"]
    assert all(name.split()[-1].replace("ñ", r"{\~n}") in read("README.md") for name in authors)


def test_every_python_that_is_named_is_tested():
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    jobs = load_yaml(".github/workflows/ci.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == jobs["wheel"]["strategy"]["matrix"]["python"] == named


def test_the_lowest_and_the_highest_torch_are_tested():
    (lowest,) = re.findall(r"torch>=(\d+\.\d+),", " ".join(PROJECT["dependencies"]))
    (highest,) = re.findall(r"^torch==(.+)$", read("constraints.txt"), flags=re.MULTILINE)
    assert load_yaml(".github/workflows/ci.yml")["jobs"]["wheel"]["strategy"]["matrix"]["torch"] == [f"{lowest}.0", highest]


def test_every_extra_is_checked_from_the_wheel():
    tree = ast.parse(read(".ci/check_wheel.py"))
    (checks,) = (
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CHECKS"
    )
    assert isinstance(checks, ast.Dict)
    checked = {key.value for key in checks.keys if isinstance(key, ast.Constant)}
    assert checked - {"base"} == PROJECT["optional-dependencies"].keys() - {"dev", "docs"}


def test_pre_commit_runs_our_version_of_ruff():
    (pinned,) = re.findall(r"^ruff==(.+)$", read("constraints.txt"), flags=re.MULTILINE)
    revisions = {entry["repo"].rsplit("/", 1)[-1]: entry["rev"] for entry in load_yaml(".pre-commit-config.yaml")["repos"]}
    assert revisions["ruff-pre-commit"] == f"v{pinned}"


def test_make_has_the_targets_that_workflows_run():
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), flags=re.MULTILINE))
    for workflow in (ROOT / ".github" / "workflows").iterdir():
        assert set(re.findall(r"run: make ([\w-]+)", workflow.read_text(encoding="utf-8"))) <= targets


def test_every_page_is_in_the_navigation_of_the_site():
    (navigation,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(read("docs/conf.py")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NAVIGATION"
    )
    listed = [page for pages in navigation.values() for page in pages]
    docs = ROOT / "docs"
    pages = [page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.md")]
    expected = {page for page in pages if not page.startswith("reference/")} - {"index", "api"} | {"reference/index"}
    assert len(listed) == len(set(listed))
    assert set(listed) == expected
