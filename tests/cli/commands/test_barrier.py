import pytest
from cli_files import MLP

import onebasin as ob


def test_barrier(onebasin, folder):
    curve = ("--points", "5", "--data", "cli_networks:batches")
    ran = onebasin(
        "barrier",
        "a.safetensors",
        "b.pt",
        *MLP,
        *curve,
        "--json",
        "--picture",
        "x.svg",
        "--permutation",
        "inverse.safetensors",
    )
    assert ran.code == 3  # there is no such permutation
    ob.Permutation.load(folder / "p.safetensors").inverse().save(folder / "inverse.safetensors")
    arguments = ("barrier", "a.safetensors", "b.pt", *MLP, *curve, "-p", "inverse.safetensors", "--report", "r.html")
    ran = onebasin(*arguments, "--json", "--picture", "x.svg")
    assert ran.code == 0
    paths = ran.record["paths"]
    assert paths["aligned"]["barrier"] == pytest.approx(0, abs=1e-5)
    assert len(paths["as they are"]["metrics"]["loss"]) == 5
    assert "accuracy" in paths["as they are"]["metrics"]
    assert (folder / "x.svg").read_text().startswith("<?xml")
    page = (folder / "r.html").read_text()
    assert "Permutation matrices of b.pt" in page
    assert "Pinned, and why" in page
    ran = onebasin(*arguments, "--force")
    assert "as they are" in ran.out
    assert "AUC" in ran.out
