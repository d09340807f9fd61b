import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.checkpoints import move_adapter
from onebasin.symmetries.indices import dependencies, find_parent
from onebasin.tensors.states import read_state
from tests.checkpoints.adapted_network import TOKENS, adapted
from tests.networks import CASES


def lazily(state):
    return read_state(state).lazily()


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
    refuse(adapter, "moves differently for every .*: it cannot be followed", symmetry.random())


def _is_nested(symmetry, key):
    layout = symmetry.layouts[key]
    return len(layout) > 1 and any(
        find_parent(layout, 1, siblings, parent) != 1 for parent, siblings in dependencies(layout[1], symmetry.parents)
    )


class Stream(nn.Module):
    """An embedding, attention in two heads and ReLU, behind layer norms whose gains are one."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.up, self.down = nn.Embedding(5, 8), nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        x = self.embed(x)
        q, k, v = (f(self.norm(x)).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.last(self.norm(x + self.down(torch.relu(self.up(self.norm(x))))))


@pytest.fixture(scope="module")
def transformed():
    """A network, a transform of all kinds, and a LoRA on every weight of two axes."""
    torch.manual_seed(0)
    model = Stream().double().eval()
    symmetry = ob.symmetry(model, TOKENS, kinds="all")
    assert {basis.kind for basis in symmetry.bases.values()} >= {"linear", "centred"}
    assert symmetry.scales
    lora = {}
    for name in ("up", "down", "q", "k", "v", "o", "last"):
        out, inputs = model.get_submodule(name).weight.shape
        lora[f"base_model.model.{name}.lora_A.weight"] = torch.randn(3, inputs, dtype=torch.float64)
        lora[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, 3, dtype=torch.float64)
    lora["base_model.model.embed.lora_embedding_A"] = torch.randn(3, 5, dtype=torch.float64)
    lora["base_model.model.embed.lora_embedding_B"] = torch.randn(8, 3, dtype=torch.float64)
    return model, ob.Transform.random(symmetry, torch.Generator().manual_seed(0)), lora


def merge_all(state, lora):
    result = dict(state)
    for key, a in lora.items():
        if "_A" in key:
            name = key.removeprefix("base_model.model.").partition(".lora_")[0]
            product = lora[key.replace("_A", "_B")] @ a
            result[f"{name}.weight"] = state[f"{name}.weight"] + (product.T if "embedding" in key else product)
    return result


def test_a_lora_is_transformed_with_its_model(transformed):
    model, transform, lora = transformed
    merged = merge_all(model.state_dict(), lora)
    moved = move_adapter(transform, lazily(lora)).load()
    assert moved.keys() == lora.keys()
    found = merge_all(transform.apply(model), moved)
    for key, value in transform.apply(merged).items():
        torch.testing.assert_close(found[key], value)
    outputs = [torch.func.functional_call(model, state, TOKENS) for state in (merged, found)]
    torch.testing.assert_close(*outputs)


def test_whole_modules_are_transformed(transformed):
    model, transform, _ = transformed
    whole = {
        f"base_model.model.last.modules_to_save.default.{name}": value for name, value in model.last.state_dict().items()
    }
    moved = move_adapter(transform, lazily(whole)).load()
    expected = transform.apply(model)
    for name in ("weight", "bias"):
        assert torch.equal(moved[f"base_model.model.last.modules_to_save.default.{name}"], expected[f"last.{name}"])


def test_what_cannot_follow_a_transform_is_refused(transformed):
    model, transform, _ = transformed
    magnitude = {"base_model.model.up.lora_magnitude_vector": model.up.weight.detach().norm(dim=1)}
    with pytest.raises(ValueError, match=r"is a magnitude \(DoRA\) of a weight that is scaled or mixed"):
        move_adapter(transform, lazily(magnitude))
    moved = move_adapter(ob.Transform(transform.permutation, {}), lazily(magnitude)).load()
    expected = move_adapter(transform.permutation, lazily(magnitude)).load()
    assert all(torch.equal(moved[key], value) for key, value in expected.items())
    gain = {"base_model.model.norm.modules_to_save.default.weight": torch.full((8,), 2.0)}
    with pytest.raises(ValueError, match=r"norm.modules_to_save.default.weight' is a gain and must be filled with 1"):
        move_adapter(transform, lazily(gain))
