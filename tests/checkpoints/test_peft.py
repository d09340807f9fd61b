"""Adapters that PEFT itself wrote, where that is installed (``make mergekit``): on the moved model they do what they did."""

import pytest
import torch

from onebasin.checkpoints import open_models, write_checkpoint
from onebasin.checkpoints.moving import move_file

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.parametrize(
    ("kind", "shape", "targets", "options"),
    [
        ("Llama", LLAMA, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "embed_tokens"], {}),
        ("Llama", LLAMA, ["q_proj", "o_proj", "down_proj"], {"use_dora": True}),
        ("GPT2", GPT2, ["c_attn", "c_fc", "c_proj"], {}),  # whose weights are (inputs, outputs)
    ],
)
def test_adapters_follow_their_model(tmp_path, kind, shape, targets, options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape)
    network = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    model = network(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False, **options))
    adapted.save_pretrained(tmp_path / "lora")
    opened = open_models([tmp_path / "base"])
    (checkpoint,) = opened.checkpoints
    permutation = opened.symmetry.random(torch.Generator().manual_seed(1))
    write_checkpoint(tmp_path / "moved", permutation.apply(checkpoint), checkpoint)
    move_file(permutation, tmp_path / "lora").write(tmp_path / "moved-lora")

    def run(adapter: str) -> torch.Tensor:
        base = network.from_pretrained(tmp_path / "moved")
        return peft.PeftModel.from_pretrained(base, tmp_path / adapter).eval()(torch.arange(8).unsqueeze(0)).logits

    expected = adapted.eval()(torch.arange(8).unsqueeze(0)).logits
    torch.testing.assert_close(run("moved-lora"), expected, rtol=1e-4, atol=1e-5)
    assert (run("lora") - expected).abs().max() > 0.1
