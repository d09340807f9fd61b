import builtins
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.landscape.paths import LinearPath
from onebasin.lineage import Evidence
from onebasin.reporting.figures import matrix_png
from onebasin.reporting.report import Report, render
from onebasin.tensors.distances import LayerDistance

VOID = {"meta", "img", "line", "path", "use", "rect", "wbr"}
WEIGHTS = [0, 0.25, 0.5, 0.75, 1]
NAIVE = LinearPath(WEIGHTS, {"loss": [0.1, 0.8, 1.2345, 0.8, 0.2], "accuracy": [0.9, 0.4, 0.3, 0.4, 0.8]})
ALIGNED = LinearPath(WEIGHTS, {"loss": [0.1, 0.15, 0.2, 0.2, 0.2], "accuracy": [0.9, 0.9, 0.9, 0.8, 0.8]})


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 100)
        self.second = nn.Linear(100, 8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)
        self.spare = nn.Linear(1, 1)  # too small for the units of a group

    def forward(self, x):
        x = self.second(torch.relu(self.first(x)))
        return self.last(x + self.mix(x, x, x, need_weights=False)[0])


class Page(HTMLParser):
    """A strict reading of a page: tags must nest."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def values(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


@pytest.fixture(scope="module")
def full() -> Report:
    pytest.importorskip("matplotlib")
    torch.manual_seed(0)
    a, b, x = Attention(), Attention(), torch.randn(2, 4, 5)
    symmetry = ob.symmetry(a, x)
    alignment = ob.align(b, to=a, symmetry=symmetry, steps=5)
    paths = {"as they are": NAIVE, "aligned": ALIGNED}
    facts = [("seed", "17"), ("test accuracy", "96.25%")]
    return Report("Two attentions", "onebasin align b to a", symmetry, None, alignment, paths, facts)


def test_everything_is_said(full):
    page = Page(render(full))
    assert ("h1", {}) in page.tags
    alignment = full.alignment
    assert alignment is not None
    assert alignment.notes[0] in page.text
    for words in ("Two attentions", "onebasin align b to a", "seed 17", "test accuracy 96.25%", "as they are", "aligned"):
        assert words in page.text
    for value in (alignment.start_cost, alignment.cost, NAIVE.barrier, NAIVE.auc, ALIGNED.auc, 1.2345, 0.3):
        assert f"{value:#.4g}".replace("-", "\N{MINUS SIGN}") in page.text
    for name in alignment.permutation.symmetry.groups:
        assert name in page.text.replace(". ", ".")
    for words in ("100 of 100 moved", "model input (x)", "never used", "spare.weight", "first.weight[1]", "for each mix"):
        assert words.lower() in page.text.lower()
    assert len([tag for tag, _ in page.tags if tag == "img"]) == len(alignment.permutation.indices)
    assert page.values("class").count("plot") == 3  # loss, accuracy, convergence


def test_nothing_is_loaded_and_nothing_runs(full):
    text = render(full)
    page = Page(text)
    assert "://" not in text
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "base"}
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    for address in page.values("src"):
        assert address.startswith("data:image/png;base64,")
    for address in [*page.values("href"), *re.findall(r"url\((.*?)\)", text)]:
        assert address.startswith("#")
        assert address[1:] in ids
    assert len([tag for tag, _ in page.tags if tag == "style"]) == 1  # one of a picture would leak into the page


def test_light_and_dark_and_narrow(full):
    text = render(full)
    assert "@media (prefers-color-scheme: dark)" in text
    assert '<meta name="viewport" content="width=device-width' in text
    used, defined = (set(re.findall(pattern, text)) for pattern in (r"var\((--[\w-]+)\)", r"(--[\w-]+):"))
    assert used <= defined
    # Every colour of a picture is one of the page's: a fixed one would vanish on one of the two backgrounds.
    assert not re.findall(r"(?:fill|stroke): ?#\w+", text.partition("<main>")[2])


def test_it_is_small_and_the_same_each_time(full):
    assert render(full) == render(full)
    assert len(render(full)) < 80_000


HOSTILE = "<script>alert('x')</script>&\"$\\frac{$"


def test_what_users_wrote_is_escaped():
    pytest.importorskip("matplotlib")
    symmetry = ob.Symmetry.from_axes({HOSTILE[:8]: "h<b> i", "w": "o h<b>"}, ["h<b>"])
    symmetry = symmetry.bind({HOSTILE[:8]: torch.zeros(3, 2), "w": torch.zeros(1, 3)})
    path = LinearPath(WEIGHTS, {**NAIVE.metrics, HOSTILE: NAIVE.losses})
    page = Page(render(Report(HOSTILE, HOSTILE, symmetry, symmetry.identity(), None, {HOSTILE: path}, [(HOSTILE, HOSTILE)])))
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count(HOSTILE) >= 6
    assert "h<b>" in page.text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_losses_that_are_not_numbers(value):
    pytest.importorskip("matplotlib")
    broken = LinearPath([0, 0.5, 1], {"loss": [0.1, value, 0.2]})
    lost = LinearPath([0, 0.5, 1], {"loss": [value] * 3})
    assert str(value) in Page(render(Report("t", paths={"broken": broken, "lost": lost}))).text


def test_parts_may_be_missing():
    assert "<section>" not in render(Report("Nothing to say"))
    activation_matching = [{"batches": 8, "sites": 4}]
    w = {"w": torch.zeros(3, 2)}
    symmetry = ob.Symmetry.from_axes({"w": "h i"}, ["h"]).bind(w)
    alignment = ob.Alignment(w, symmetry.identity(), 1.0, 2.0, activation_matching, True, 0.1, "activation-matching", w)
    text = render(Report("t", alignment=alignment))
    assert "Convergence" not in text
    assert "0 of 3 moved" in text


def test_a_merge_has_several_permutations():
    symmetry = ob.Symmetry.from_axes({"w": "h i"}, ["h"]).bind({"w": torch.zeros(3, 2)})
    turned = ob.Permutation(symmetry, {"h": torch.tensor([1, 2, 0])})
    page = Page(render(Report("t", permutations={"b.pt": turned, "c.pt": symmetry.identity()})))
    assert "Permutation matrices of b.pt" in page.text
    assert "moved in b.pt moved in c.pt" in page.text
    assert "h 3 3 0 w[0]" in page.text
    assert len(page.values("src")) == 2


def test_averages_are_lines_with_a_legend():
    pytest.importorskip("matplotlib")
    averages = {"the merge": {"loss": 0.25, "accuracy": 0.875}, "without alignment": {"loss": 3.125}}
    plain = Report("t", paths={"a to b": NAIVE, "a to c": ALIGNED}, ends=("start", "end"))
    page = Page(render(replace(plain, averages=averages)))
    assert "the merge 0.2500 0.8750" in page.text
    assert "without alignment 3.125" in page.text
    assert "loss at start" in page.text
    assert "loss at A" not in page.text
    strokes = [Page(render(report)).values("style") for report in (plain, replace(plain, averages=averages))]
    lines = [sum("stroke-width: 1.2" in style for style in found) for found in strokes]
    assert lines[1] - lines[0] == 3  # two in the picture of the loss, one in that of the accuracy


def test_distances_by_layer_before_and_after():
    distances = {"b.pt": {"fc.1": LayerDistance(1.5, 0.75), "fc.2": LayerDistance(math.nan, 0.5)}}
    page = Page(render(Report("t", distances=distances)))
    assert "Distance by layer of b.pt" in page.text
    assert "1.500 0.7500" in page.text.replace("fc. 1", "")
    widths = [float(attributes["width"]) for tag, attributes in page.tags if tag == "rect"]
    assert widths == pytest.approx([100, 50, 0, 100 / 3], abs=0.01)
    assert "distance" not in render(Report("t", distances={"b.pt": {}})).lower()


def test_on_a_phone_every_cell_has_its_heading():
    pytest.importorskip("matplotlib")
    page = Page(render(Report("t", paths={"p": NAIVE})))
    assert [label for label in page.values("data-label") if "midpoint" in label] == [
        "loss at the midpoint",
        "accuracy at the midpoint",
    ]
    narrow = render(Report("t")).partition("@media (max-width")[2]
    assert "attr(data-label)" in narrow


def test_words_hold_in_light_and_dark():
    symmetry = ob.Symmetry.from_axes({"w": "h i"}, ["h"]).bind({"w": torch.zeros(3, 2)})
    text = Page(render(Report("t", permutation=symmetry.identity()))).text.lower()
    assert not re.search("dark|light|black|white|grey|colou?r", text)


def test_long_values_stand_in_rows():
    facts = [("seed", "17"), ("method", "activation-matching"), ("written", "runs/2026/digits/merged.safetensors")]
    tiles, _, rows = render(Report("t", facts=facts)).partition("class='rows'")
    assert "activation-matching" in tiles
    assert "merged.safetensors" not in tiles
    assert "merged.safetensors" in rows


def test_two_hundred_groups_are_folded():
    axes = {f"layers.{i}.weight": f"h{i} h{i - 1}" if i else "h0 i" for i in range(200)}
    tensors = {key: torch.zeros(300, 300) for key in axes}
    symmetry = ob.Symmetry.from_axes(axes, [f"h{i}" for i in range(200)]).bind(tensors)
    text = render(Report("Large", permutation=symmetry.random(torch.Generator().manual_seed(0))))
    page = Page(text)
    assert "188 more" in page.text
    assert "All 200 groups" in page.text
    assert len([tag for tag, _ in page.tags if tag == "img"]) == 200
    assert len(text) < 400_000


def test_a_report_is_written_whole_or_not_at_all(tmp_path):
    report = Report("t", facts=[("a", "b")])
    report.save(tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text(encoding="utf-8") == render(report)
    with pytest.raises(ValueError, match="does not exist"):
        report.save(tmp_path / "missing" / "out.html")
    with pytest.raises(AttributeError):
        replace(report, paths={"wrong": None}).save(tmp_path / "out.html")  # type: ignore[dict-item]
    assert (tmp_path / "out.html").read_text(encoding="utf-8") == render(report)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "17" in render(Report("t", facts=[("seed", "17")]))
    with pytest.raises(ImportError, match=r"pip install 'onebasin\[plots\]'"):
        render(Report("t", paths={"p": NAIVE}))


def test_a_family_is_drawn_with_its_parents():
    axes = {"w": "(h d) i", "s": "h"}
    symmetry = ob.Symmetry.from_axes(axes, ["h", "d[h]"]).bind({"w": torch.zeros(4, 2), "s": torch.zeros(2)})
    swap = ob.Permutation(symmetry, {"h": torch.tensor([1, 0]), "d": torch.tensor([[0, 1], [0, 1]])})
    text = render(Report("t", permutation=swap))
    assert "4 of 4 moved" in text  # the heads changed places and took their units along
    assert matrix_png(torch.tensor([2, 3, 0, 1])) in text


def test_evidence_is_a_table_whose_names_are_escaped():
    found = Evidence("residual", "<b>group", 64, 60, 1e-40, 1e-60, ("fc.weight",), ("fc2.weight",))
    page = render(Report("Kin", evidence=[found]))
    assert "Evidence by group" in page
    assert "&lt;b&gt;group" in page
    assert "1e-40" in page
    assert "fc2.weight" in page
    assert "Evidence by group" not in render(Report("Kin"))
