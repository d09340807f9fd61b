from tests.cli.cli_files import MLP, assert_same, digest, load


def test_data_that_does_not_fit_is_refused_before_anything_is_written(onebasin, folder):
    before = digest(folder)
    for data, words in (("odd_batches", "cannot be run on this data"), ("generator", "can be read once")):
        for command in ("align", "merge"):
            files = ("a.safetensors", "b.pt", "-o", "c.pt", "--report", "r.html")
            ran = onebasin(command, *files, *MLP, "--data", f"cli_networks:{data}")
            assert ran.code == 3
            assert words in ran.err
    assert digest(folder) == before


def test_the_first_batch_shows_what_inputs_look_like(onebasin, folder):
    plain = ("--model", "cli_networks:make_mlp")
    assert onebasin("align", "a.safetensors", "b.pt", "-o", "c.pt", *plain).code == 3
    data = ("--data", "digits")
    assert onebasin("align", "a.safetensors", "b.pt", "-o", "c.pt", *plain, *data).code == 0
    assert onebasin("merge", "a.safetensors", "b.pt", "-o", "m.pt", *plain, *data).code == 0
    assert onebasin("barrier", "a.safetensors", "c.pt", *plain, *data, "--points", "2").code == 0
    assert_same(load(folder / "c.pt"), load(folder / "a.safetensors"))
