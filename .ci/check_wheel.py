"""Build the wheel, install it with each extra alone in an environment of its own, and run there what the extra is for.

python .ci/check_wheel.py --extras "base cli" --torch 2.11.0

The Python that runs this is the one that is tested. The README's Python blocks run in every environment.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_FOLDER = """
from pathlib import Path
from onebasin.checkpoints import find_architecture
Path("config.json").write_text(config)
print(find_architecture(".").symmetry().summary())
"""
_NAMED = """
from onebasin.checkpoints import find_architecture
from onebasin.cli.torchvision_operators import declare_missing_operators
declare_missing_operators()  # for a torchvision that was built for another torch, as the command does
print(find_architecture("{}").symmetry().summary())
"""
_STRATEGY = """
from onebasin.cli.torchvision_operators import declare_missing_operators
declare_missing_operators()  # as above
import onebasin.continual.avalanche
"""
_FACTORY = """
import torch, onebasin as ob
from torch import nn
def make():
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)), torch.zeros(1, 4)
if __name__ == "__main__":
    for name in ("a.pt", "b.pt"):
        torch.save(make()[0].state_dict(), name)
"""
_DRAW = """
import onebasin as ob
ob.LinearPath([0.0, 0.5, 1.0], {"loss": [1.0, 2.0, 1.0]}).plot().figure.savefig("line.svg")
"""
_ENGINE = """
import torch, onebasin as ob
from onebasin.checkpoints import open_checkpoint
from onebasin.engines import make_engine
a = {"up.weight": torch.randn(64, 8), "down.weight": torch.randn(4, 64)}
symmetry = ob.Symmetry.from_axes({"up.weight": "h i", "down.weight": "o h"}, ["h"], a)
torch.save(a, "a.pt")
torch.save(symmetry.random().apply(a), "b.pt")
with make_engine("ray", workers=2) as engine:
    b = open_checkpoint("b.pt")
    found = ob.align(b, to=open_checkpoint("a.pt"), symmetry=symmetry, method="weight-matching", engine=engine)
assert found.cost < 1e-6, found
"""
_MERGE = "onebasin merge a.pt b.pt -o merged.pt --model nets:make --report merged.html"

CHECKS: dict[str, list[str]] = {
    "base": ["! onebasin doctor 2> said", "grep -q 'onebasin\\[cli\\]' said"],
    "cli": ["onebasin doctor", "python nets.py", _MERGE, "grep -q '</html>' merged.html"],
    "plots": ["python draw.py", "grep -q '<svg' line.svg"],
    "assignment": ["python -c 'import lap, torch, onebasin as ob; print(ob.assign(torch.rand(300, 300))[:3])'"],
    "vision": ["python named.py torchvision:resnet18"],
    "timm": ["python named.py timm:resnet10t"],
    "hf": ["python folder.py gpt2"],
    "diffusers": ["python folder.py unet"],
    "avalanche": ["python strategy.py"],
    "ray": ["python engine.py"],
}
"""For each extra, commands that must succeed with it alone."""

CONFIGURATIONS = {
    "gpt2": '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 16, "n_head": 2, '
    '"vocab_size": 32, "n_positions": 16}',
    "unet": '{"_class_name": "UNet2DModel", "sample_size": 8, "block_out_channels": [8, 8], "norm_num_groups": 2, '
    '"layers_per_block": 1, "down_block_types": ["DownBlock2D", "DownBlock2D"], '
    '"up_block_types": ["UpBlock2D", "UpBlock2D"]}',
}


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout."""
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def write_constraints(folder: Path, torch: str) -> Path:
    """Our constraints; with another torch, without the pins of what must fit it."""
    text = (ROOT / "constraints.txt").read_text()
    if torch:
        kept = [line for line in text.splitlines() if not line.startswith(("torch==", "torchvision=="))]
        text = "\n".join([*kept, f"torch=={torch}", ""])
    file = folder / "constraints.txt"
    file.write_text(text)
    return file


def write_scripts(folder: Path) -> None:
    """What the commands run."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (folder / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    (folder / "nets.py").write_text(_FACTORY)
    (folder / "draw.py").write_text(_DRAW)
    (folder / "engine.py").write_text(_ENGINE)
    (folder / "strategy.py").write_text(_STRATEGY)
    (folder / "named.py").write_text("import sys" + _NAMED.replace('"{}"', "sys.argv[1]"))
    (folder / "folder.py").write_text(f"import sys\nconfig = {CONFIGURATIONS!r}[sys.argv[1]]{_FOLDER}")


def check(extra: str, wheel: Path, constraints: Path) -> None:
    """Install and run; raises if a command fails."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run([sys.executable, "-m", "venv", str(folder / "venv")])
        pip = [
            str(folder / "venv/bin/python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--disable-pip-version-check",
        ]
        _run([*pip, "-c", str(constraints), f"{wheel}[{extra}]" if extra != "base" else str(wheel)])
        write_scripts(folder)
        for command in ["python readme.py", *CHECKS[extra]]:
            script = f'set -e; export PATH="{folder / "venv/bin"}:$PATH" PYTHONSAFEPATH=1; cd {folder}; {command}'
            _run(["bash", "-c", script])
    print(f"{extra}: works ({time.perf_counter() - begin:.0f} s)", flush=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def main() -> None:
    """Check the extras that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", default="", help="names, or base for none; all if empty")
    parser.add_argument("--torch", default="", help="another version than that of constraints.txt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        wheel, constraints = build_wheel(Path(name)), write_constraints(Path(name), options.torch)
        print(f"Python {sys.version.split()[0]}, {wheel.name}", flush=True)
        for extra in options.extras.split() or CHECKS:
            check(extra, wheel, constraints)


if __name__ == "__main__":
    main()
