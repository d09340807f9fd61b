"""The CUDA kernels with other launch configurations than `operator.launch` chooses, to tune it for a new GPU.

python -m benchmarks.sinkhorn_launches [--resident]
"""

import math
import statistics
import sys
from unittest.mock import patch

import torch

from onebasin.operator import launch
from onebasin.operator.launch import LaunchConfig, configure_streaming, count_sms, launch_gradient, launch_rounds

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


def compare_resident() -> None:
    """Tiles of other heights, for the sizes that are kept in registers."""
    num_sms = count_sms(torch.device("cuda", torch.cuda.current_device()))
    for batch, n in ((2, 128), (2, 200), (2, 256), (1, 512), (2, 512), (2, 1024)):
        logits, grad = 4 * torch.randn(2, batch, n, n, device="cuda")  # sharp enough for ten solver steps
        print(f"n = {n}, batch {batch}, chosen {launch.configure_resident(n, batch, num_sms)}")
        for rows in (4, 8, 16, 32, 128):
            for num_warps in (2, 4, 8, 16):
                if rows < n and 32 * num_warps > launch._pad(n):
                    continue  # see kernels/all_reduce.py
                config = LaunchConfig(math.ceil(n / rows), batch, rows, num_warps)
                with patch.object(launch, "configure_resident", lambda *_, config=config: config):
                    try:
                        plan, column_sums, _ = launch_rounds(logits, 1.0, 20, None)
                        forward = device_ms(lambda: launch_rounds(logits, 1.0, 20, None))  # noqa: B023
                        back = device_ms(lambda: launch_gradient(plan, column_sums, grad, 1.0, max_steps=10))  # noqa: B023
                        print(f"  rows {rows:3} warps {num_warps:2} rounds {forward:7.3f} ms   gradient {back:7.3f} ms")
                    except Exception as error:  # more programs than fit, or more registers than there are
                        print(f"  rows {rows:3} warps {num_warps:2} {str(error).splitlines()[0][:80]}")


def main() -> None:
    if "--resident" in sys.argv:
        compare_resident()
        return
    num_sms = count_sms(torch.device("cuda", torch.cuda.current_device()))
    for batch, n in CASES:
        logits, grad = torch.randn(2, batch, n, n, device="cuda")
        plan, column_sums, _ = launch_rounds(logits, 1.0, 20, None)
        chosen = configure_streaming(n, batch, num_sms)
        configs: dict[str, LaunchConfig | None] = {"automatic": None, "streaming": chosen}
        for factor in (0.25, 0.5, 2.0):
            num_ranks = max(1, min(int(chosen.num_ranks * factor), 2 * num_sms // chosen.num_slots))
            configs[f"ranks {num_ranks}"] = chosen._replace(num_ranks=num_ranks)
        for rows in (1, 2, 4, 8, 16):
            configs[f"rows {rows}"] = chosen._replace(rows=rows)
        configs["warps 4"] = chosen._replace(num_warps=4)
        print(f"n = {n}, batch {batch}, chosen {chosen}")
        for name, config in configs.items():
            try:
                forward = device_ms(lambda config=config: launch_rounds(logits, 1.0, 20, None, config))  # noqa: B023
                back = device_ms(lambda config=config: launch_gradient(plan, column_sums, grad, 1.0, config))  # noqa: B023
            except RuntimeError as error:  # more programs than fit, or more registers than there are
                print(f"  {name:12} {str(error).splitlines()[0]}")
                continue
            print(f"  {name:12} rounds {forward:7.3f} ms   gradient {back:7.3f} ms")


if __name__ == "__main__":
    main()
