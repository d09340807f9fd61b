def test_inspect(onebasin, folder):
    ran = onebasin("inspect", "cli_networks:make_with_inputs")
    assert ran.code == 0
    assert "2 groups; 24 of 24 hidden units free (100.0%)" in ran.out
    assert "5.weight[0]" in ran.out
    assert "model output" in ran.out
    record = onebasin("inspect", "cli_networks:make_mlp", "--input-shape", "1,1,8,8", "--json").record
    assert record["groups"]["1.weight"] == {"size": 12, "parents": [], "axes": ["1.weight[0]", "1.bias[0]", "3.weight[1]"]}
    assert "of 24 units moved" in onebasin("inspect", "p.safetensors").out
    assert "group     size  moves" in onebasin("inspect", "cli_networks:make_with_inputs", "--all").out
