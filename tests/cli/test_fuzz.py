"""Real files, damaged at random: every one of them is refused in one sentence, or was not damaged where it matters."""

import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onebasin.symmetries import Permutation
from tests.cli.cli_files import digest, run_forked, write_llama, write_pair
from tests.cli.cli_networks import make_mlp

MODEL = ["--model", "cli_networks:make_with_inputs"]
DATA = ["--data", "cli_networks:batches"]
COMMANDS = {
    "apply file": ["apply", "p.safetensors", "a.safetensors", "-o", "out.safetensors"],
    "apply torch": ["apply", "p.safetensors", "b.pt", "-o", "out.pt"],
    "apply optimizer": ["apply", "p.safetensors", "optimizer.pt", "-o", "out.pt"],
    "apply folder": ["apply", "q.safetensors", "llama", "-o", "out"],
    "align": ["align", "a.safetensors", "b.pt", "-o", "out.pt", "--no-check", *MODEL],
    "merge": ["merge", "a.safetensors", "b.pt", "-o", "out.safetensors", "--no-check", *MODEL],
    "merge folders": ["merge", "llama", "llama", "-o", "out", "--no-check"],
    "verify": ["verify", "a.safetensors", "b.pt", *MODEL],
    "apply lora": ["apply", "p.safetensors", "lora", "-o", "out"],
    "barrier": ["barrier", "a.safetensors", "b.pt", "--points", "2", "-p", "p.safetensors", "--no-check", *MODEL, *DATA],
    "inspect": ["inspect", "p.safetensors"],
    "inspect folder": ["inspect", "llama", "--no-check"],
}
SLOW_COMMANDS = {"merge folders", "inspect folder"}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    pytest.importorskip("typer")
    from onebasin.cli.app import run

    folder = tmp_path_factory.mktemp("pristine")
    write_pair(folder)
    write_llama(folder / "llama", seed=0)
    model = make_mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "lora").mkdir()
    lora = {"base_model.model.3.lora_A.weight": torch.randn(2, 12), "base_model.model.3.lora_B.weight": torch.randn(12, 2)}
    save_file(lora, folder / "lora" / "adapter_model.safetensors")
    (folder / "lora" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "fan_in_fan_out": false}')
    assert run(["align", str(folder / "llama"), str(folder / "llama"), "-o", str(folder / "copy")]) == 0
    Permutation.load(folder / "copy" / "permutation.safetensors").save(folder / "q.safetensors")
    shutil.rmtree(folder / "copy")
    return folder


def flip_bits(content: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice([1, 1, 3, 50])):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def flip_at_the_start(content: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice([1, 2, 8])):
        content[chance.randrange(min(len(content), 600))] = chance.randrange(256)


def cut(content: bytearray, chance: random.Random) -> None:
    del content[chance.choice([0, 1, 7, 8, 9, chance.randrange(len(content)), len(content) - 1]) :]


def blank(content: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(content))
    end = min(len(content), start + chance.choice([4, 64, 4096]))
    content[start:end] = bytes([chance.choice([0, 255])]) * (end - start)


def insert(content: bytearray, chance: random.Random) -> None:
    place = chance.randrange(len(content))
    content[place:place] = chance.randbytes(chance.choice([1, 8, 500]))


def remove(content: bytearray, chance: random.Random) -> None:
    place = chance.randrange(len(content))
    del content[place : place + chance.choice([1, 8, 500])]


def replace_all(content: bytearray, chance: random.Random) -> None:
    content[:] = chance.choice([b"{}", b"null", b"[]", b"\x80\x02.", b"PK\x05\x06" + bytes(18), b"\xff" * 64, b"a" * 999])


def swap_digits(content: bytearray, chance: random.Random) -> None:
    """In headers, JSON and pickles numbers are sizes, offsets and shapes."""
    places = [i for i, byte in enumerate(content[:4000]) if chr(byte).isdigit()]
    for place in chance.sample(places, min(len(places), chance.choice([1, 2, 5]))):
        content[place] = ord(chance.choice("0123456789-.e"))


DAMAGES = [flip_bits, flip_at_the_start, cut, blank, insert, remove, replace_all, swap_digits]


def in_folder(folder: Path, arguments: list[str]) -> list[str]:
    """The same arguments, with paths in a folder."""
    return [str(folder / word) if (folder / word).exists() or word.startswith("out") else word for word in arguments]


def run_case(pristine: Path, folder: Path, seed: int) -> str:
    """Damage one file, run one command, look at everything; returns what happened."""
    chance = random.Random(seed)
    shutil.copytree(pristine, folder)
    names = [name for name in COMMANDS if name not in SLOW_COMMANDS or chance.random() < 0.3]
    name = chance.choice(names)
    arguments = COMMANDS[name]
    used = [folder / word for word in arguments if (folder / word).exists()]
    victim = chance.choice(used)
    if victim.is_dir():
        victim = chance.choice(sorted(victim.iterdir()))
    damage = chance.choice(DAMAGES)
    if chance.random() < 0.05:
        victim.unlink()
    else:
        content = bytearray(victim.read_bytes())
        damage(content, chance)
        victim.write_bytes(content)
    before = digest(folder)
    code, text = run_forked(in_folder(folder, arguments), folder.with_suffix(".log"))
    told = f"seed {seed}: {name}, {victim.name}, {damage.__name__}: exit {code}\n{text}"
    assert code in (0, 1, 3), told
    assert "Traceback" not in text, told
    after = digest(folder)
    made = {path: content for path, content in after.items() if path.startswith(("out", ".out"))}
    assert {path: content for path, content in after.items() if path not in made} == before, f"an input changed: {told}"
    if code == 3:
        assert text.count("error: ") == 1, told
        assert len(text[text.index("error: ") :].strip().splitlines()) <= 2, f"more than a sentence: {told}"
        assert not made, f"left behind {list(made)}: {told}"
    assert not any(".tmp" in path or ".old" in path for path in made), told
    shutil.rmtree(folder)
    return {0: "done", 1: "verify says no", 3: "refused"}[code]


def test_files_that_are_not_damaged_are_not_refused(pristine, tmp_path):
    for name, arguments in COMMANDS.items():
        folder = tmp_path / name
        shutil.copytree(pristine, folder)
        code, text = run_forked(in_folder(folder, arguments), folder.with_suffix(".log"))
        assert code == 0, f"{name}: exit {code}\n{text}"


@pytest.mark.parametrize("part", range(3))
def test_damaged_files(pristine, tmp_path, monkeypatch, part):
    monkeypatch.setenv("COLUMNS", "500")
    for seed in range(10 * part, 10 * part + 10):
        run_case(pristine, tmp_path / f"case{seed}", seed)


@pytest.fixture(scope="module")
def outcomes_of_all():
    """Counts of what happened; written as a record where ONEBASIN_RECORD names a file."""
    counts = Counter()
    yield counts
    if file := os.environ.get("ONEBASIN_RECORD"):
        record = {"cases": counts.total(), "outcomes": counts, "torch": torch.__version__, "commands": list(COMMANDS)}
        Path(file).write_text(json.dumps(record, indent=1) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_damaged_files(pristine, tmp_path, monkeypatch, outcomes_of_all, part):
    monkeypatch.setenv("COLUMNS", "500")
    outcomes = [run_case(pristine, tmp_path / f"case{seed}", seed) for seed in range(1000 + 50 * part, 1050 + 50 * part)]
    outcomes_of_all.update(outcomes)
    assert outcomes.count("refused") > len(outcomes) / 3  # most damage is seen
