import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onebasin.checkpoints import check_finite, fit_names, open_checkpoint, write_checkpoint

STATE = {"fc.weight": torch.arange(6.0).view(2, 3), "fc.bias": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(3)}


def write_sharded(folder: Path, ending: str) -> Path:
    folder.mkdir()
    names = {"fc.weight": f"model-1{ending}", "fc.bias": f"model-2{ending}", "n": f"model-2{ending}"}
    for file in sorted(set(names.values())):
        part = {key: STATE[key] for key in STATE if names[key] == file}
        save_file(part, folder / file) if ending == ".safetensors" else torch.save(part, folder / file)
    index = "model.safetensors.index.json" if ending == ".safetensors" else "pytorch_model.bin.index.json"
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    return folder


def make(kind: str, folder: Path) -> Path:
    match kind:
        case "safetensors":
            save_file(STATE, folder / "m.safetensors", metadata={"author": "me"})
            return folder / "m.safetensors"
        case "torch":
            torch.save(STATE, folder / "m.pt")
            return folder / "m.pt"
        case "legacy":
            torch.save(STATE, folder / "m.pth", _use_new_zipfile_serialization=False)
            return folder / "m.pth"
        case "no ending":
            torch.save(STATE, folder / "weights")
            return folder / "weights"
        case "container":
            torch.save({"state_dict": STATE, "epoch": 3}, folder / "m.ckpt")
            return folder / "m.ckpt"
        case "shards":
            return write_sharded(folder / "m", ".safetensors")
        case "torch shards":
            return write_sharded(folder / "m", ".bin")
        case "index":
            return write_sharded(folder / "m", ".safetensors") / "model.safetensors.index.json"
    raise AssertionError


KINDS = ["safetensors", "torch", "legacy", "no ending", "container", "shards", "torch shards", "index"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_and_written_as_it_was(kind, tmp_path):
    checkpoint = open_checkpoint(make(kind, tmp_path))
    assert checkpoint.keys() == STATE.keys()
    for key, value in STATE.items():
        assert checkpoint.shapes[key].shape == value.shape
        assert checkpoint.shapes[key].dtype == value.dtype
        assert torch.equal(checkpoint[key], value)
    out = tmp_path / ("out" if checkpoint.layout.is_folder else f"out{checkpoint.layout.path.suffix or '.pt'}")
    write_checkpoint(out, checkpoint.map(lambda key, value: value + 1), checkpoint)
    again = open_checkpoint(out)
    assert again.keys() == STATE.keys()
    for key, value in STATE.items():
        assert torch.equal(again[key], value + 1)
        assert again[key].dtype == value.dtype
    assert [file.name for file in again.layout.files] == [file.name for file in checkpoint.layout.files] or not out.is_dir()
    assert again.layout.container == checkpoint.layout.container


def test_what_is_written_is_read_by_the_libraries_themselves(tmp_path):
    from safetensors.torch import load_file

    checkpoint = open_checkpoint(make("safetensors", tmp_path))
    write_checkpoint(tmp_path / "o.safetensors", checkpoint, checkpoint)
    write_checkpoint(tmp_path / "o.pt", checkpoint, checkpoint)
    for found in (load_file(tmp_path / "o.safetensors"), torch.load(tmp_path / "o.pt", weights_only=True)):
        assert found.keys() == STATE.keys()
        assert all(torch.equal(found[key], value) for key, value in STATE.items())
    assert open_checkpoint(tmp_path / "o.safetensors").layout.metadata == {tmp_path / "o.safetensors": {"author": "me"}}
    empty = {"e": torch.empty(0, 3), "s": torch.tensor(1.5, dtype=torch.float16), "b": torch.tensor([True, False])}
    save_file(empty, tmp_path / "odd.safetensors")
    odd = open_checkpoint(tmp_path / "odd.safetensors")
    write_checkpoint(tmp_path / "odd2.safetensors", odd, odd)
    assert {k: v.tolist() for k, v in load_file(tmp_path / "odd2.safetensors").items()} == {
        "e": [],
        "s": 1.5,
        "b": [True, False],
    }


def test_a_view_does_not_take_its_whole_storage_along(tmp_path):
    torch.save({"w": torch.zeros(1000, 1000)}, tmp_path / "big.pt")
    checkpoint = open_checkpoint(tmp_path / "big.pt")
    rows = checkpoint.map(lambda key, value: value[:1000])
    write_checkpoint(tmp_path / "out.pt", rows, checkpoint)
    assert (tmp_path / "out.pt").stat().st_size < 1.01 * (tmp_path / "big.pt").stat().st_size


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, legacy):
    marker = tmp_path / "it ran"
    torch.save({"w": torch.zeros(2), "x": Payload(marker)}, tmp_path / "evil.pt", _use_new_zipfile_serialization=not legacy)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Payload(marker)))
    for file in ("evil.pt", "plain.pt"):
        with pytest.raises(ValueError, match=r"would run code to be read, which is never done|is damaged"):
            open_checkpoint(tmp_path / file)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(ValueError, match=r"save model.state_dict\(\) in it"):
        open_checkpoint(tmp_path / "module.pt")
    assert not marker.exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert marker.exists()  # it would have


def refuse(path: Path, message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(path)
    assert str(path.name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refusals(tmp_path):
    refuse(tmp_path / "nothing.pt", "there is no file or folder", FileNotFoundError)
    refuse(tmp_path, "holds no checkpoint: expected model.safetensors, ")
    for name in ("empty.safetensors", "empty.pt"):
        (tmp_path / name).touch()
        refuse(tmp_path / name, "is empty")
    for name in ("noise.safetensors", "noise.pt", "noise"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 9)
        refuse(tmp_path / name, "is not a .* file, or it is damaged|is damaged, or holds more")
    for kind in ("safetensors", "torch"):
        file = make(kind, tmp_path)
        file.write_bytes(file.read_bytes()[:-3])
        refuse(file, "damaged")
    (tmp_path / "pointer.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refuse(tmp_path / "pointer.bin", "is a Git LFS pointer")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    refuse(tmp_path / "list.pt", "holds a list, not a state dict")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    refuse(tmp_path / "none.pt", "holds no tensors")
    save_file({}, tmp_path / "none.safetensors")
    refuse(tmp_path / "none.safetensors", "holds no tensors")
    torch.save({"w": torch.eye(2).to_sparse()}, tmp_path / "sparse.pt")
    refuse(tmp_path / "sparse.pt", "'w' in .* is not a plain tensor")
    torch.save({3: torch.eye(2)}, tmp_path / "keys.pt")
    refuse(tmp_path / "keys.pt", "it has the key 3")


def test_a_flipped_bit_in_a_torch_file_is_noticed(tmp_path):
    torch.save({"w": torch.ones(1000)}, tmp_path / "m.pt")
    content = bytearray((tmp_path / "m.pt").read_bytes())
    content[content.index(torch.ones(1000).numpy().tobytes()) + 1999] ^= 1
    (tmp_path / "m.pt").write_bytes(content)
    refuse(tmp_path / "m.pt", "checksum")


def test_damaged_indices(tmp_path):
    folder = write_sharded(tmp_path / "m", ".safetensors")
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def refuse_index(content: object, message: str, error: type[Exception] = ValueError) -> None:
        index.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(error, match=message):
            open_checkpoint(folder)

    refuse_index("{", "is not an index of shards")
    refuse_index([], "is not an index of shards")
    refuse_index({"weight_map": {}}, "must name files beside it")
    refuse_index({"weight_map": {"n": "../other.safetensors"}}, "must name files beside it")
    refuse_index({"weight_map": {"n": "gone.safetensors"}}, "the shard gone.safetensors is missing", FileNotFoundError)
    moved = {**good["weight_map"], "fc.bias": "model-1.safetensors"}
    refuse_index({"weight_map": moved}, "which model.safetensors.index.json does not place there")
    refuse_index(
        {"weight_map": {**good["weight_map"], "more": "model-1.safetensors"}},
        "'more' in model-1.safetensors, which does not",
    )


def test_nan_is_found(tmp_path):
    torch.save({"w": torch.tensor([1.0, float("nan")]), "v": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"'w' in .*m.pt holds NaN or infinity"):
        check_finite(open_checkpoint(tmp_path / "m.pt"))
    save_file({"w": torch.ones(3).to(torch.float8_e4m3fn)}, tmp_path / "m.safetensors")
    check_finite(open_checkpoint(tmp_path / "m.safetensors"))


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
