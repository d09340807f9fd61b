from tests.cli.cli_files import MLP, digest


def test_dry_run_writes_nothing(onebasin, folder):
    before = digest(folder)
    for command in (
        ["align", "a.safetensors", "b.pt", "-o", "c.pt", *MLP, "--report", "r.html"],
        ["merge", "a.safetensors", "b.pt", "-o", "c.safetensors", *MLP],
        ["apply", "p.safetensors", "b.pt", "-o", "c.pt"],
        ["barrier", "a.safetensors", "b.pt", *MLP, "--data", "digits"],
    ):
        ran = onebasin(*command, "--dry-run")
        assert ran.code == 0
        assert "would" in ran.out
        assert onebasin(*command, "--dry-run", "--json").record["dry_run"]
    assert digest(folder) == before
