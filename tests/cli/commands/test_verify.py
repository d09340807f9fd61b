import torch
from cli_files import MLP, load


def test_verify_answers_by_its_exit_code(onebasin, folder):
    ran = onebasin("verify", "a.safetensors", "b.pt", *MLP)
    assert ran.code == 0
    assert "same function  yes" in ran.out
    state = load(folder / "b.pt")
    state["1.weight"][0, 0] += 1e-3
    torch.save(state, folder / "c.pt")
    ran = onebasin("verify", "a.safetensors", "c.pt", *MLP, "--json")
    assert ran.code == 1
    assert not ran.record["same"]
    assert 1e-9 < ran.record["difference"] < 1
    assert onebasin("verify", "a.safetensors", "c.pt", *MLP, "--tolerance", "1").code == 0
