"""Workers and drivers killed at random, and nothing lost: ``python -m benchmarks.faults --runs 50``.

Small networks in shards are aligned and written by the engine "processes" in a driver of its own. At random moments either a
worker or the driver is killed, without a warning. A driver that was killed is started again with the journal it left. Each
run must end with the same bits as one that nobody disturbed, with the inputs untouched, and with no other file left.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import find_commit

ROOT = Path(__file__).parent.parent
DEPTH, WIDTH, INNER = 12, 96, 160


def write_pair(folder: Path) -> None:
    """Two networks in shards, and their symmetry as a permutation."""
    sys.path[:0] = [str(ROOT / "tests" / "engines")]
    import sharded_networks as small

    small.DEPTH, small.WIDTH = DEPTH, WIDTH
    first, second = small.make_states()
    small.write_shards(folder / "a", first, 6)
    small.write_shards(folder / "b", second, 6)
    small.make_symmetry().bind(first).identity().save(folder / "symmetry.safetensors")


def drive(folder: Path, resume: bool, pause: float) -> None:
    """What a driver does; every task takes a while, so that there is time to be killed in."""
    import onebasin as ob
    from onebasin.checkpoints import open_checkpoint, write_checkpoint
    from onebasin.engines import Journal
    from onebasin.engines.processes import ProcessEngine

    symmetry = ob.Permutation.load(folder / "symmetry.safetensors").symmetry
    first, second = (open_checkpoint(folder / name) for name in "ab")
    with ProcessEngine(2, threads=1) as engine:
        engine.journal = Journal(folder / ".out.resume", {"pause": pause}, resume)
        (folder / "pids").write_text(" ".join(map(str, engine.process_ids)))
        run = engine._run

        def run_and_tell(function: Any, items: Any) -> Any:
            for answer in run(function, items):
                (folder / "pids").write_text(" ".join(map(str, engine.process_ids)))
                time.sleep(pause)
                yield answer

        engine._run = run_and_tell  # type: ignore[method-assign]
        result = ob.align(second, to=first, symmetry=symmetry, method="weight-matching", engine=engine)
        write_checkpoint(folder / "out", result.model, second, engine=engine)
        result.permutation.save(folder / "out.permutation.safetensors")
        engine.journal.remove()


def start(folder: Path, resume: bool, pause: float) -> subprocess.Popen[bytes]:
    """A driver in a process of its own."""
    words = ["--drive", str(folder), "--pause", str(pause), *(["--resume"] if resume else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "benchmarks.faults", *words], env=environment, stderr=subprocess.DEVNULL)


def digest(folder: Path) -> str:
    """Of the permutation and all weight files of the output."""
    total = hashlib.sha256()
    for file in [folder / "out.permutation.safetensors", *sorted((folder / "out").iterdir())]:
        total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()


def disturb(folder: Path, chance: random.Random, pause: float) -> dict[str, int]:
    """Run until it is done, killing a worker or the driver now and then."""
    killed = {"workers": 0, "drivers": 0}
    resume = False
    while True:
        driver = start(folder, resume, pause)
        while driver.poll() is None:
            time.sleep(chance.uniform(0.1, 1.5))
            journal = folder / ".out.resume" / "run.json"
            if killed["drivers"] < 3 and journal.is_file() and chance.random() < 0.3:
                driver.kill()
                driver.wait()
                killed["drivers"] += 1
                assert not (folder / "out").exists() or not journal.exists(), "a half output"
            elif killed["workers"] < 6 and (folder / "pids").is_file():
                found = (folder / "pids").read_text().split()
                if found and driver.poll() is None:
                    try:
                        os.kill(int(chance.choice(found)), signal.SIGKILL)
                        killed["workers"] += 1
                    except ProcessLookupError:
                        pass
        if driver.returncode == 0:
            return killed
        assert driver.returncode == -signal.SIGKILL, f"the driver failed with {driver.returncode}"
        resume = (folder / ".out.resume" / "run.json").is_file()


def main() -> None:
    """Print a line for each run, and write the record with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two results, to be killed in")
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.drive:
        drive(options.drive, options.resume, options.pause)
        return
    folder = Path(tempfile.mkdtemp())
    record: dict[str, Any] = {"commit": find_commit(), "runs": []}
    try:
        write_pair(folder)
        assert start(folder, False, 0.0).wait() == 0
        expected = digest(folder)
        inputs = {file: file.read_bytes() for name in "ab" for file in (folder / name).iterdir()}
        for number in range(options.runs):
            shutil.rmtree(folder / "out")
            (folder / "out.permutation.safetensors").unlink()
            (folder / "pids").unlink(missing_ok=True)
            killed = disturb(folder, random.Random(options.seed + number), options.pause)
            left = {file.name for file in folder.iterdir()}
            row = {
                "run": number,
                **killed,
                "same_bits": digest(folder) == expected,
                "inputs_untouched": all(file.read_bytes() == content for file, content in inputs.items()),
                "left_over": sorted(left - {"a", "b", "out", "out.permutation.safetensors", "symmetry.safetensors", "pids"}),
            }
            record["runs"].append(row)
            print(row, flush=True)
            if options.out:
                options.out.write_text(json.dumps(record, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kills = sum(row["workers"] + row["drivers"] for row in record["runs"])
    good = sum(row["same_bits"] and row["inputs_untouched"] and not row["left_over"] for row in record["runs"])
    print(f"{good} of {len(record['runs'])} runs ended with the same bits and nothing left over, after {kills} kills")


if __name__ == "__main__":
    main()
