"""Every change of basis and every scale is in the report, and it is a page that stands alone."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.reporting.report import Report, render
from onebasin.reporting.transform_sections import render_bases, render_scales
from onebasin.symmetries.transform_sizes import measure_bases, measure_scales
from tests.basis_networks import Attention, D, Model, RMSNorm, SwiGLU
from tests.reporting.test_report import Page


@pytest.fixture(scope="module")
def transform():
    torch.manual_seed(0)
    model = Model([Attention(rotate="halves"), SwiGLU()], [RMSNorm(D) for _ in range(3)]).eval()
    return ob.Transform.random(ob.symmetry(model, torch.randn(2, 4, 3), kinds="all"), torch.Generator().manual_seed(0))


def test_bases_are_listed_with_their_kinds_and_numbers(transform):
    page = Page(render_bases("b & c", transform))
    assert "Changes of basis of b & c" in page.text
    kinds = {basis.kind for basis in transform.symmetry.bases.values()}
    assert kinds == {"orthogonal", "linear", "signed", "rotary"}
    for size in measure_bases(transform):
        assert size.name in page.text.replace(". ", ".")
        assert size.kind in page.text
        for number in (size.distance, size.condition):
            assert f"{number:#.4g}" in page.text
    drawn = sum(basis.kind in ("orthogonal", "linear") for basis in transform.symmetry.bases.values())
    assert [attributes["class"] for tag, attributes in page.tags if tag == "figure"] == ["matrix heat"] * drawn


def test_scales_are_listed_with_their_range(transform):
    page = Page(render_scales("", transform))
    assert page.text.startswith("Positive scales What makes a unit")
    (size,) = measure_scales(transform)
    for number in (size.lowest, size.highest):
        assert f"{number:#.4g}" in page.text
    assert [tag for tag, _ in page.tags].count("svg") == 1


def test_what_is_not_there_is_not_shown(transform):
    plain = ob.Transform(transform.permutation, {})
    assert (render_bases("", plain), render_scales("", plain)) == ("", "")
    ones = {name: 0 * value for name, value in transform.logarithms.items()}
    assert "1.000" in render_scales("", ob.Transform(transform.permutation, ones))


def test_many_are_folded():
    """A deep linear network has a basis in each layer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(31)))
    transform = ob.Transform.random(ob.symmetry(model, torch.randn(2, 4), kinds="all"))
    text = render_bases("", transform)
    assert "All 30 changes of basis" in text
    assert "18 more" in text


def test_the_page_has_them_for_an_alignment_and_for_each_model_of_a_merge(transform):
    pytest.importorskip("matplotlib")
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2)) for _ in range(2)]
    options = {"method": "weight-matching", "kinds": "all", "scaling": ob.Scaling(steps=2)}
    alignment = ob.align(*models, example_inputs=torch.randn(4, 3), **options)
    page = Page(render(Report("One", alignment=alignment)))
    assert "Changes of basis Units are permuted" in page.text
    assert "Positive scales What makes" in page.text
    text = render(Report("Many", transforms={"b": transform, "c": transform}))
    page = Page(text)
    for name in "bc":
        assert f"Changes of basis of {name}" in page.text
        assert f"Positive scales of {name}" in page.text
    assert "://" not in text
    assert all(address.startswith("data:image/png;base64,") for address in page.values("src"))
