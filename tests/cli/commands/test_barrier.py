import pytest
import torch

import onebasin as ob
from tests.cli.cli_files import MLP
from tests.cli.cli_networks import make_transformer


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


def test_lines_to_a_transformed_model(onebasin, folder):
    torch.manual_seed(0)
    model, inputs = make_transformer()
    transform = ob.Transform.random(ob.symmetry(model, inputs, kinds="all"))
    transform.save(folder / "t.safetensors")
    torch.save(model.state_dict(), folder / "x.pt")
    torch.save(transform.inverse().apply(model), folder / "y.pt")
    torch.save({**model.state_dict(), "2.weight": torch.full((8,), 2.0)}, folder / "gains.pt")
    options = ("--model", "cli_networks:make_transformer", "--data", "cli_networks:sequences", "-p", "t.safetensors")
    loss = ("--loss", "cli_networks:at_every_position", "--points", "3")
    ran = onebasin("barrier", "x.pt", "y.pt", *options, *loss, "--json", "--report", "r.html")
    assert ran.code == 0, ran.err
    assert ran.record["paths"]["aligned"]["barrier"] == pytest.approx(0, abs=1e-5)
    for ends in (("gains.pt", "y.pt"), ("x.pt", "gains.pt")):
        ran = onebasin("barrier", *ends, *options, *loss)
        assert ran.code == 3
        assert "gains.pt: '2.weight' must be filled with 1" in ran.err


def test_a_device_that_is_not_there_is_refused(onebasin, folder):
    ran = onebasin("barrier", "a.safetensors", "b.pt", *MLP, "--data", "digits", "--device", "nowhere")
    assert ran.code == 3
    assert "cannot compute on 'nowhere'" in ran.err


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("folder")
def test_the_device_does_not_change_the_curve(onebasin):
    command = ("barrier", "a.safetensors", "b.pt", *MLP, "--data", "cli_networks:batches", "--points", "3", "--json")
    found = [onebasin(*command, "--device", device).record["paths"]["as they are"] for device in ("cpu", "cuda")]
    assert found[1]["metrics"]["loss"] == pytest.approx(found[0]["metrics"]["loss"], rel=1e-4)
