"""How the CUDA kernels do with other teams than `choose_team` and `choose_strips` give: for choosing on a new GPU.

python -m benchmarks.sinkhorn_teams [--strips]
"""

import math
import statistics
import sys
from unittest.mock import patch

import torch

from onebasin.operator import launching
from onebasin.operator.launching import Team, _num_processors, choose_team, launch_gradient, launch_rounds

CASES = [
    (1, 96),
    (1, 128),
    (1, 200),
    (1, 256),
    (1, 512),
    (1, 1024),
    (1, 2048),
    (1, 4096),
    (32, 256),
    (32, 512),
]


def device_ms(call, repeats: int = 20) -> float:
    """Median time on the device, without what Python and the launch take."""
    call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # the host gets ahead, so that the events hold kernels alone
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def compare_strips() -> None:
    """Strips of other heights, for the sizes that are kept in registers."""
    num_processors = _num_processors(torch.device("cuda", torch.cuda.current_device()))
    for batch, n in ((2, 128), (2, 200), (2, 256), (1, 512), (2, 512), (2, 1024)):
        logits, grad = 4 * torch.randn(2, batch, n, n, device="cuda")  # sharp enough for ten solver steps
        print(f"n = {n}, batch {batch}, chosen {launching.choose_strips(n, batch, num_processors)}")
        for rows in (4, 8, 16, 32, 128):
            for num_warps in (2, 4, 8, 16):
                if rows < n and 32 * num_warps > launching._pad(n):
                    continue  # see kernels/mail.py
                strips = Team(math.ceil(n / rows), batch, rows, num_warps)
                with patch.object(launching, "choose_strips", lambda *_, strips=strips: strips):
                    try:
                        plan, columns, _ = launch_rounds(logits, 1.0, 20, None)
                        forward = device_ms(lambda: launch_rounds(logits, 1.0, 20, None))  # noqa: B023
                        back = device_ms(lambda: launch_gradient(plan, columns, grad, 1.0, max_steps=10))  # noqa: B023
                        print(f"  rows {rows:3} warps {num_warps:2} rounds {forward:7.3f} ms   gradient {back:7.3f} ms")
                    except Exception as error:  # more programs than fit, or more registers than there are
                        print(f"  rows {rows:3} warps {num_warps:2} {str(error).splitlines()[0][:80]}")


def main() -> None:
    if "--strips" in sys.argv:
        compare_strips()
        return
    num_processors = _num_processors(torch.device("cuda", torch.cuda.current_device()))
    for batch, n in CASES:
        logits, grad = torch.randn(2, batch, n, n, device="cuda")
        plan, columns, _ = launch_rounds(logits, 1.0, 20, None)
        chosen = choose_team(n, batch, num_processors)
        teams: dict[str, Team | None] = {"automatic": None, "chosen team": chosen}
        for factor in (0.25, 0.5, 2.0):
            size = max(1, min(int(chosen.size * factor), 2 * num_processors // chosen.num_teams))
            teams[f"size {size}"] = chosen._replace(size=size)
        for rows in (1, 2, 4, 8, 16):
            teams[f"rows {rows}"] = chosen._replace(rows=rows)
        teams["warps 4"] = chosen._replace(num_warps=4)
        print(f"n = {n}, batch {batch}, chosen {chosen}")
        for name, team in teams.items():
            try:
                forward = device_ms(lambda team=team: launch_rounds(logits, 1.0, 20, None, team))  # noqa: B023
                back = device_ms(lambda team=team: launch_gradient(plan, columns, grad, 1.0, team))  # noqa: B023
            except RuntimeError as error:  # more programs than fit, or more registers than there are
                print(f"  {name:12} {str(error).splitlines()[0]}")
                continue
            print(f"  {name:12} rounds {forward:7.3f} ms   gradient {back:7.3f} ms")


if __name__ == "__main__":
    main()
