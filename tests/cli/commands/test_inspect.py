import json

import pytest

import onebasin as ob
from tests.cli.cli_files import write_llama
from tests.cli.cli_networks import make_transformer
from tests.cli.hugging_face_families import save_family


def test_inspect(onebasin, folder):
    ran = onebasin("inspect", "cli_networks:make_with_inputs")
    assert ran.code == 0
    assert "2 groups; 24 of 24 hidden units free (100.0%)" in ran.out
    assert "5.weight[0]" in ran.out
    assert "model output" in ran.out
    record = onebasin("inspect", "cli_networks:make_mlp", "--input-shape", "1,1,8,8", "--json").record
    axes = ["1.weight[0]", "1.bias[0]", "3.weight[1]"]
    assert record["groups"]["1.weight"] == {"size": 12, "parents": [], "kind": "permutation", "axes": axes}
    assert "of 24 units moved" in onebasin("inspect", "p.safetensors").out
    assert "group     size  moves" in onebasin("inspect", "cli_networks:make_with_inputs", "--all").out


def test_scales_and_bases(onebasin, folder):
    ran = onebasin("inspect", "cli_networks:make_transformer", "--symmetry", "all")
    assert ran.code == 0
    for text in ("changes of basis", "basis ", "centred", "linear", "scale ", "positive", "1.linear1.weight"):
        assert text in ran.out
    assert "this is for gains of one, as the model starts" in ran.err
    record = onebasin("inspect", "cli_networks:make_transformer", "--symmetry", "all", "--json").record
    stream = record["bases"]["0.weight"]
    assert stream["kind"] == record["groups"]["0.weight"]["kind"] == "centred"
    assert stream["places"]["3.weight"] == [{"axis": 1, "number": 0, "is_dual": True}]
    assert record["scales"]["1.linear1.weight"]["powers"]["1.linear2.weight"] == [{"axis": 1, "number": 0, "exponent": -1}]
    assert record["fixed"]["2.weight"] == 1
    plain = onebasin("inspect", "cli_networks:make_transformer", "--json").record
    assert plain["scales"] == plain["bases"] == {}
    everything = onebasin("inspect", "cli_networks:make_transformer", "--symmetry", "all", "--all").out
    assert "by the dual" in " ".join(everything.split())
    symmetry = ob.symmetry(*make_transformer(), kinds="all")
    ob.Transform.random(symmetry).save(folder / "t.safetensors")
    ran = onebasin("inspect", "t.safetensors")
    assert ran.out.startswith("Transform(Permutation(")
    assert "centred" in ran.out


def test_the_weights_of_a_folder_tell_which_gains_stay(onebasin, folder):
    transformers = pytest.importorskip("transformers")
    write_llama(folder / "t", seed=0)
    ran = onebasin("inspect", "t", "--symmetry", "all", "--json")
    assert "the gain model.norm.weight stays" in ran.err
    assert "4 gains of norms were folded" in ran.record["notes"]
    assert "orthogonal" not in {basis["kind"] for basis in ran.record["bases"].values()}
    config = transformers.AutoConfig.from_pretrained(folder / "t")
    config.save_pretrained(folder / "empty")
    record = onebasin("inspect", "empty", "--symmetry", "all", "--json").record
    assert "orthogonal" in {basis["kind"] for basis in record["bases"].values()}


def test_the_output_that_fixes_a_stream_is_named(onebasin, folder):
    """T5 returns what its encoder says beside the logits, and all its streams share an embedding."""
    save_family("t5", 0, folder / "t5")
    ran = onebasin("inspect", "t5", "--symmetry", "all", "--json")
    assert "shared.weight[1]" in ran.record["pinned"]["model output (encoder_last_hidden_state)"]
    gain = "the gain encoder.final_layer_norm.weight stays: its units are not free: model output (encoder_last_hidden_state)"
    assert gain in ran.record["notes"]


@pytest.mark.parametrize("entry", ["num_hidden_layers", "vocab_size"])
def test_a_folder_is_compared_with_its_tensors(onebasin, folder, entry):
    """Without the weights beside it, 900 layers would be built."""
    write_llama(folder / "llama", seed=0)
    file = folder / "llama" / "config.json"
    size = {"num_hidden_layers": 900, "vocab_size": 10**6}[entry]
    file.write_text(json.dumps({**json.loads(file.read_text()), entry: size}))
    ran = onebasin("inspect", "llama")
    assert ran.code == 3
    assert f"llama/config.json says {entry}: {size}, but the checkpoint has 20 tensors" in " ".join(ran.err.split())
