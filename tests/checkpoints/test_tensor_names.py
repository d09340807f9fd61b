import pytest
import torch
from safetensors.torch import save_file

from onebasin.checkpoints import check_finite, fit_names, open_checkpoint, write_checkpoint
from tests.checkpoints.checkpoint_files import STATE

SHAPES = {"fc.weight": torch.empty(2, 3), "fc.bias": torch.empty(2)}


@pytest.mark.parametrize(
    ("prefix", "note"),
    [
        ("", None),
        ("module.", "begin with 'module.'"),
        ("_orig_mod.", "begin with '_orig_mod.'"),
        ("model.", "begin with 'model.'"),
        ("module._orig_mod.", "begin with 'module._orig_mod.'"),
        ("model._orig_mod.module.", "begin with 'model._orig_mod.module.'"),
    ],
)
def test_prefixes_are_taken_off_reported_and_kept_in_what_is_written(tmp_path, prefix, note):
    torch.save({prefix + key: STATE[key] for key in SHAPES}, tmp_path / "m.pt")
    fitted = fit_names(open_checkpoint(tmp_path / "m.pt"), SHAPES)
    assert list(fitted) == list(SHAPES)
    assert torch.equal(fitted["fc.weight"], STATE["fc.weight"])
    assert [n for n in fitted.notes if note is None or note not in n] == []
    assert bool(fitted.notes) == (note is not None)
    write_checkpoint(tmp_path / "o.pt", fitted.map(lambda key, value: -value), fitted)
    again = open_checkpoint(tmp_path / "o.pt")
    assert list(again) == [prefix + key for key in SHAPES]
    assert torch.equal(again[f"{prefix}fc.weight"], -STATE["fc.weight"])


def test_a_prefix_that_the_file_lacks_is_put_on(tmp_path):
    torch.save({key: STATE[key] for key in SHAPES}, tmp_path / "m.pt")
    shapes = {f"transformer.{key}": value for key, value in SHAPES.items()}
    fitted = fit_names(open_checkpoint(tmp_path / "m.pt"), shapes)
    assert list(fitted) == list(shapes)
    assert "lack the model's 'transformer.'" in fitted.notes[0]


def test_names_that_do_not_fit(tmp_path):
    torch.save(STATE, tmp_path / "m.pt")
    checkpoint = open_checkpoint(tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"'n' in .* is not in the model \(1 such\)"):
        fit_names(checkpoint, SHAPES)
    fitted = fit_names(checkpoint, SHAPES, ignore=["n"])
    assert "left as they are: n" in fitted.notes
    write_checkpoint(tmp_path / "o.pt", fitted.map(lambda key, value: -value), fitted)
    assert open_checkpoint(tmp_path / "o.pt")["n"] == 3
    with pytest.raises(ValueError, match=r"has no 'more', which the model has \(1 of 4 are missing\)"):
        fit_names(checkpoint, {**SHAPES, "n": torch.empty(()), "more": torch.empty(1)})
    with pytest.raises(ValueError, match=r"'fc.weight' in .* has shape \(2, 3\), the model has \(3, 2\)"):
        fit_names(checkpoint, {**SHAPES, "n": torch.empty(()), "fc.weight": torch.empty(3, 2)})


def test_an_alias_may_be_left_out(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "m.pt")
    fitted = fit_names(open_checkpoint(tmp_path / "m.pt"), {"a": torch.empty(2), "b": torch.empty(2)}, ties=[("a", "b")])
    assert torch.equal(fitted["b"], torch.ones(2))
    write_checkpoint(tmp_path / "o.pt", fitted.map(lambda key, value: value + 1), fitted)
    assert list(open_checkpoint(tmp_path / "o.pt")) == ["a"]


def test_weight_norm(tmp_path):
    """The old names of weight norm are understood where the model has it, and refused where it has not."""
    old = torch.nn.Linear(3, 2)
    state = {
        "weight_g": old.weight.detach().norm(dim=1, keepdim=True),
        "weight_v": old.weight.detach(),
        "bias": old.bias.detach(),
    }
    torch.save({f"0.{key}": value for key, value in state.items()}, tmp_path / "m.pt")
    model = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2)))
    fitted = fit_names(open_checkpoint(tmp_path / "m.pt"), model.state_dict())
    assert "weight norm is read under its present names" in fitted.notes
    model.load_state_dict(fitted.load())
    torch.testing.assert_close(model[0].weight, old.weight)
    with pytest.raises(ValueError, match=r"is a parametrisation \(weight norm\) that the model does not have"):
        fit_names(open_checkpoint(tmp_path / "m.pt"), torch.nn.Sequential(old).state_dict())


def test_nan_is_found(tmp_path):
    torch.save({"w": torch.tensor([1.0, float("nan")]), "v": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"'w' of .*m.pt holds NaN or infinity"):
        check_finite(open_checkpoint(tmp_path / "m.pt"))
    save_file({"w": torch.ones(3).to(torch.float8_e4m3fn)}, tmp_path / "m.safetensors")
    check_finite(open_checkpoint(tmp_path / "m.safetensors"))
