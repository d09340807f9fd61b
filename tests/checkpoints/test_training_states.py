import pytest
import torch

import onebasin as ob
from onebasin.checkpoints import fit_names, move_training_entries, note_left_entries, open_checkpoint
from onebasin.checkpoints.moving import move_file
from tests.checkpoints.adapted_network import TOKENS, Network, adapted


def train(model, optimizer, average, schedule, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS).square().sum().backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)


def make_training(model):
    """An optimiser with two groups, a schedule and a moving average."""
    groups = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    return optimizer, average, torch.optim.lr_scheduler.StepLR(optimizer, 2)


@pytest.fixture
def trained(tmp_path):
    """A training checkpoint on disk, the permutation to move it by, and what was saved."""
    model, _, permutation, _, _ = adapted()
    optimizer, average, schedule = make_training(model)
    train(model, optimizer, average, schedule)
    saved = {
        "epoch": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
        "average": average.state_dict(), "generators": [torch.get_rng_state()], "losses": torch.rand(8), "best": (0.5, None),
    }  # fmt: skip
    torch.save(saved, tmp_path / "last.ckpt")
    return model, (optimizer, average, schedule), permutation, saved


def test_training_goes_on_from_a_moved_checkpoint(tmp_path, trained):
    """The strongest oracle: resume from the moved file, and arrive at the moved result."""
    model, (optimizer, average, schedule), permutation, saved = trained
    moved = move_file(permutation, tmp_path / "last.ckpt")
    assert "moved with the model: optimizer, average" in moved.notes
    moved.write(tmp_path / "moved.ckpt")
    found = torch.load(tmp_path / "moved.ckpt", weights_only=True)
    assert found.keys() == saved.keys()
    twin = Network()
    twin_optimizer, twin_average, twin_schedule = make_training(twin)
    for each, name in (
        (twin, "model"),
        (twin_optimizer, "optimizer"),
        (twin_average, "average"),
        (twin_schedule, "schedule"),
    ):
        each.load_state_dict(found[name])
    train(model, optimizer, average, schedule)
    train(twin, twin_optimizer, twin_average, twin_schedule)
    for expected, result in ((model, twin), (average.module, twin_average.module)):
        for key, value in permutation.apply(expected).items():
            torch.testing.assert_close(result.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    assert found["epoch"] == 3
    assert found["best"] == (0.5, None)
    assert torch.equal(found["losses"], saved["losses"])
    assert torch.equal(found["generators"][0], saved["generators"][0])


def test_moving_there_and_back_changes_nothing(tmp_path, trained):
    _, _, permutation, saved = trained
    move_file(permutation, tmp_path / "last.ckpt").write(tmp_path / "there.ckpt")
    move_file(permutation.inverse(), tmp_path / "there.ckpt").write(tmp_path / "back.ckpt")
    found = torch.load(tmp_path / "back.ckpt", weights_only=True)
    assert all(torch.equal(found["average"][key], value) for key, value in saved["average"].items())
    for number, entries in saved["optimizer"]["state"].items():
        assert all(torch.equal(found["optimizer"]["state"][number][name], value) for name, value in entries.items())


def test_the_model_alone_can_be_written(tmp_path, trained):
    _, _, permutation, _ = trained
    with pytest.raises(
        ValueError, match=r"out.safetensors can hold tensors alone, but there are other entries .*model-only"
    ):
        move_file(permutation, tmp_path / "last.ckpt").check(tmp_path / "out.safetensors")
    moved = move_file(permutation, tmp_path / "last.ckpt", model_only=True)
    assert any(note.startswith("left out, as only the model is written: epoch, optimizer, schedule") for note in moved.notes)
    moved.write(tmp_path / "out.safetensors")
    moved.write(tmp_path / "out.ckpt")
    assert torch.load(tmp_path / "out.ckpt").keys() == {"model"}


def open_model(path, permutation):
    layouts = permutation.symmetry.layouts
    return fit_names(open_checkpoint(path), {k: torch.empty([t.size for t in v], device="meta") for k, v in layouts.items()})


def test_copies_are_found_under_other_names_and_in_containers(tmp_path, trained):
    model, _, permutation, _ = trained
    state = model.state_dict()
    parts = {
        "model": state,
        "averages": [
            {f"module.{key}": value + 1 for key, value in state.items()},
            {"decay": 0.9, "shadow": {key: value.clone() for key, value in state.items()}},
        ],
        "optimizers": [],
    }
    torch.save(parts, tmp_path / "m.pt")
    entries = move_training_entries(permutation, open_model(tmp_path / "m.pt", permutation))
    assert entries.places == ("averages.0", "averages.1.shadow")
    for key, value in permutation.apply(model).items():
        assert torch.equal(entries.content["averages"][0][f"module.{key}"], value + 1)
        assert torch.equal(entries.content["averages"][1]["shadow"][key], value)
    assert entries.content["averages"][1]["decay"] == 0.9
    torch.save(state, tmp_path / "plain.pt")
    plain = open_model(tmp_path / "plain.pt", permutation)
    assert move_training_entries(permutation, plain).content == {}
    assert note_left_entries(plain) == ()


def test_what_may_belong_to_the_model_is_not_left_unmoved(tmp_path, trained):
    model, (optimizer, _, _), permutation, _ = trained
    shadow = [value.clone() for value in model.parameters()]
    torch.save({"model": model.state_dict(), "ema": {"shadow": shadow}}, tmp_path / "m.pt")
    found = open_model(tmp_path / "m.pt", permutation)
    with pytest.raises(ValueError, match=r"the entry 'ema.shadow.0' of .* has the shape of 'embed.weight', which moves"):
        move_training_entries(permutation, found)
    entries = move_training_entries(permutation, found, ignore=["ema.*"])
    assert torch.equal(entries.content["ema"]["shadow"][0], shadow[0])
    state = optimizer.state_dict()
    state["param_groups"] = state["param_groups"][:1]
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "o.pt")
    with pytest.raises(
        ValueError, match=r"'optimizer' of .* cannot follow the model \(--model-only .*\): the optimiser's state"
    ):
        move_training_entries(permutation, open_model(tmp_path / "o.pt", permutation))


def test_transforms_move_copies_but_no_optimizers(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    symmetry = ob.symmetry(model, torch.randn(2, 4), kinds="positive")
    transform = ob.Transform.random(symmetry, torch.Generator().manual_seed(0))
    torch.save({"model": model.state_dict(), "ema": model.state_dict()}, tmp_path / "m.pt")
    entries = move_training_entries(transform, open_model(tmp_path / "m.pt", transform))
    for key, value in transform.apply(model).items():
        torch.testing.assert_close(entries.content["ema"][key], value)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "o.pt")
    with pytest.raises(ValueError, match=r"'optimizer' .* cannot follow the model .* cannot follow positive scales"):
        move_training_entries(transform, open_model(tmp_path / "o.pt", transform))
