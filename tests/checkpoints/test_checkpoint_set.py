import pytest
import torch
from torch import nn

from onebasin.checkpoints import open_checkpoint, open_models


def make():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(2, 4)


MODEL = f"{__name__}:make"


def test_models_are_opened_under_the_names_of_their_architecture(tmp_path):
    states = [make()[0].state_dict() for _ in range(2)]
    torch.save(states[0], tmp_path / "a.pt")
    torch.save({"state_dict": {f"module.{key}": value for key, value in states[1].items()}}, tmp_path / "b.pt")
    models = open_models([tmp_path / "a.pt", open_checkpoint(tmp_path / "b.pt")], MODEL)
    assert models.symmetry.num_free == 8
    for checkpoint, state in zip(models.checkpoints, states, strict=True):
        assert list(checkpoint) == list(state)
    assert [note.partition(": ")[0] for note in models.notes] == [str(tmp_path / "b.pt")] * 2
    for model, state in zip(models.load(), states, strict=True):
        assert not model.training
        assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())


def test_narrow_types_are_widened_to_be_run(tmp_path):
    model, inputs = make()
    torch.save(model.half().state_dict(), tmp_path / "a.pt")
    models = open_models([tmp_path / "a.pt"], MODEL)
    (loaded,) = models.load()
    assert loaded(inputs).dtype == torch.float32
    assert models.checkpoints[0].shapes["0.weight"].dtype == torch.float16


def test_what_does_not_fit_is_refused(tmp_path):
    state = make()[0].state_dict()
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="do not tell their architecture: give it with --model"):
        open_models([tmp_path / "a.pt"])
    state["0.bias"][3] = float("inf")
    torch.save(state, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"'0.bias' of .*b.pt holds NaN or infinity"):
        open_models([tmp_path / "a.pt", tmp_path / "b.pt"], MODEL)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint16, torch.bool, torch.complex64])
def test_codes_are_not_taken_for_weights(tmp_path, dtype):
    state = make()[0].state_dict()
    torch.save({**state, "1.num_batches_tracked": torch.tensor(1, dtype=torch.int32)}, tmp_path / "a.pt")
    open_models([tmp_path / "a.pt"], MODEL)
    torch.save({**state, "3.weight": torch.ones(2, 8).to(dtype)}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=rf"'3.weight' in .*b.pt has the type {dtype}, and the model computes with"):
        open_models([tmp_path / "a.pt", tmp_path / "b.pt"], MODEL)
