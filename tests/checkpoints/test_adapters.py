import json

import pytest
import torch
from networks import CASES
from safetensors.torch import save_file
from torch import nn

import onebasin as ob
from onebasin.checkpoints import move_adapter, move_optimizer, open_checkpoint
from onebasin.checkpoints.moving import move_file
from onebasin.tensors.states import read_state


class Network(nn.Module):
    """A linear layer, a convolution and an embedding, all hidden."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.first = nn.Linear(6, 8)
        self.conv = nn.Conv1d(8, 7, 1)
        self.last = nn.Linear(7, 2)

    def forward(self, x):
        x = torch.tanh(self.first(torch.tanh(self.embed(x))))
        return self.last(torch.tanh(self.conv(x.transpose(1, 2))).transpose(1, 2))


TOKENS = torch.tensor([[0, 1, 2, 3, 4]])


def lazily(state):
    return read_state(state).lazily()


def adapted(seed: int = 0):
    """A network, its symmetry, a permutation, a LoRA on every weight, and the network with the LoRA merged in."""
    torch.manual_seed(seed)
    model = Network()
    symmetry = ob.symmetry(model, TOKENS)
    lora, merged = {}, dict(model.state_dict())
    for name in ("first", "conv", "last"):
        weight = merged[f"{name}.weight"]
        a, b = torch.randn(3, *weight.shape[1:]), torch.randn(weight.shape[0], 3, *[1] * (weight.dim() - 2))
        lora |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        merged[f"{name}.weight"] = weight + (b.flatten(1) @ a.flatten(1)).view(weight.shape)
    a, b = torch.randn(3, 5), torch.randn(6, 3)
    lora |= {"base_model.model.embed.lora_embedding_A": a, "base_model.model.embed.lora_embedding_B": b}
    merged["embed.weight"] = merged["embed.weight"] + (b @ a).T
    return model, symmetry, symmetry.random(torch.Generator().manual_seed(seed)), lora, merged


def merge(state, lora):
    """The base weights with a LoRA in them, written independently of the names' order."""
    result = dict(state)
    for name in ("first", "conv", "last"):
        a, b = (lora[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        result[f"{name}.weight"] = state[f"{name}.weight"] + (b.flatten(1) @ a.flatten(1)).view(
            state[f"{name}.weight"].shape
        )
    a, b = (lora[f"base_model.model.embed.lora_embedding_{part}"] for part in "AB")
    result["embed.weight"] = state["embed.weight"] + (b @ a).T
    return result


def test_a_lora_of_the_moved_model_is_the_moved_lora():
    model, _, permutation, lora, merged = adapted()
    moved = move_adapter(permutation, lazily(lora)).load()
    expected = permutation.apply(merged)
    found = merge(permutation.apply(model), moved)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)
    outputs = [torch.func.functional_call(model, state, TOKENS) for state in (merged, found)]
    torch.testing.assert_close(*outputs)


def test_transposed_base_weights():
    """GPT-2's layers are (inputs, outputs), while PEFT's A is (rank, inputs) as ever; a square one must not be guessed."""
    symmetry = ob.Symmetry.from_axes({"c.weight": "i h", "d.weight": "h o"}, free=["h"])
    state = {"c.weight": torch.randn(4, 4), "d.weight": torch.randn(4, 4)}
    permutation = symmetry.bind(state).random(torch.Generator().manual_seed(0))
    a, b = torch.randn(2, 4), torch.randn(4, 2)
    moved = move_adapter(permutation, lazily({"c.lora_A.weight": a, "c.lora_B.weight": b}), transposed=True).load()
    whole = permutation.apply({**state, "c.weight": (b @ a).T})["c.weight"]
    torch.testing.assert_close((moved["c.lora_B.weight"] @ moved["c.lora_A.weight"]).T, whole)


def test_magnitudes_and_whole_modules_move_with_their_units():
    model, _, permutation, _, _ = adapted()
    extra = {
        "base_model.model.first.lora_magnitude_vector": model.first.weight.detach().norm(dim=1),
        "base_model.model.last.modules_to_save.default.weight": model.last.weight.detach(),
    }
    moved = move_adapter(permutation, lazily(extra)).load()
    state = permutation.apply(model)
    torch.testing.assert_close(moved["base_model.model.first.lora_magnitude_vector"], state["first.weight"].norm(dim=1))
    assert torch.equal(moved["base_model.model.last.modules_to_save.default.weight"], state["last.weight"])


def test_what_cannot_follow_is_refused():
    permutation = adapted()[2]

    def refuse(adapter, message, permutation=permutation):
        with pytest.raises(ValueError, match=message):
            move_adapter(permutation, lazily(adapter))

    refuse(
        {"base_model.model.other.lora_A.weight": torch.zeros(3, 6)}, "belongs to 'other.weight', which the permutation does"
    )
    refuse({"lora_unet_down.alpha": torch.zeros(1)}, "is not part of a LoRA")
    refuse(
        {"base_model.model.first.lora_A.weight": torch.zeros(3, 5)}, r"has shape \(3, 5\), the permutation expects \(3, 6\)"
    )
    case = CASES["grouped conv"]
    torch.manual_seed(0)
    model = case.make()
    symmetry = ob.symmetry(model, case.inputs())
    key, layout = next((k, v) for k, v in symmetry.layouts.items() if k.endswith("weight") and _is_nested(symmetry, k))
    adapter = {key.replace("weight", "lora_A.weight"): torch.zeros(2, *(term.size for term in layout[1:]))}
    refuse(adapter, "moves differently for every .*: a LoRA cannot follow it", symmetry.random())


def _is_nested(symmetry, key):
    from onebasin.symmetries.layout import dependencies, find_parent

    layout = symmetry.layouts[key]
    return len(layout) > 1 and any(
        find_parent(layout, 1, siblings, parent) != 1 for parent, siblings in dependencies(layout[1], symmetry.parents)
    )


def trained(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS).square().sum().backward()
        optimizer.step()


def test_training_goes_on_as_if_nothing_had_moved(tmp_path):
    """The strongest oracle: resume on moved weights with the moved state, and arrive at the moved result."""
    model, _, permutation, _, _ = adapted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    twin = Network()
    twin.load_state_dict(permutation.apply(model))
    moved = move_file(permutation, tmp_path / "optimizer.pt")
    assert moved.kind == "optimizer"
    moved.write(tmp_path / "moved.pt", False, None)
    resumed = torch.optim.AdamW(twin.parameters(), lr=0.1)
    resumed.load_state_dict(torch.load(tmp_path / "moved.pt", weights_only=True))
    trained(model, optimizer)
    trained(twin, resumed)
    for key, value in permutation.apply(model).items():
        torch.testing.assert_close(twin.state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_optimizers_tell_the_names_of_their_parameters():
    model, _, permutation, _, _ = adapted()
    named = [(name, p) for name, p in model.named_parameters() if name.startswith(("conv", "last"))][::-1]
    optimizer = torch.optim.SGD(named, lr=0.1, momentum=0.9)
    trained(model, optimizer, 1)
    saved = optimizer.state_dict()
    moved = move_optimizer(permutation, saved)
    place = [name for name, _ in named].index("conv.weight")
    expected = permutation.move(saved["state"][place]["momentum_buffer"], permutation.symmetry.layouts["conv.weight"])
    assert torch.equal(moved["state"][place]["momentum_buffer"], expected)
    for group in saved["param_groups"]:
        del group["param_names"]
    with pytest.raises(ValueError, match="the optimiser has 4 parameters, the model 7: their names are needed"):
        move_optimizer(permutation, saved)
    with pytest.raises(ValueError, match="is not the state dict of an optimiser"):
        move_optimizer(permutation, {"state": {}})


def test_task_vectors_may_lack_tensors(tmp_path):
    model, _, permutation, _, _ = adapted()
    vector = {key: torch.randn_like(value) for key, value in model.state_dict().items() if not key.startswith("embed")}
    save_file(vector, tmp_path / "v.safetensors")
    with pytest.raises(ValueError, match=r"has no 'embed\.weight'"):
        move_file(permutation, tmp_path / "v.safetensors")
    move_file(permutation, tmp_path / "v.safetensors", kind="task-vector").write(tmp_path / "o.safetensors", False, None)
    moved = open_checkpoint(tmp_path / "o.safetensors").load()
    edited = {**model.state_dict(), **{key: model.state_dict()[key] + value for key, value in vector.items()}}
    state = permutation.apply(model)
    for key, value in permutation.apply(edited).items():
        torch.testing.assert_close(state[key] + moved[key] if key in moved else state[key], value)


def test_adapter_folders_keep_their_configuration(tmp_path):
    _, _, permutation, lora, _ = adapted()
    (tmp_path / "lora").mkdir()
    save_file(lora, tmp_path / "lora" / "adapter_model.safetensors")
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "fan_in_fan_out": False}))
    moved = move_file(permutation, tmp_path / "lora")
    assert moved.kind == "lora"
    moved.write(tmp_path / "out", False, None)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    back = move_file(permutation.inverse(), tmp_path / "out")
    back.write(tmp_path / "back", False, None)
    found = open_checkpoint(tmp_path / "back")
    assert all(torch.equal(found[key], value) for key, value in lora.items())
    (tmp_path / "lora" / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config.json is not a configuration"):
        move_file(permutation, tmp_path / "lora")
