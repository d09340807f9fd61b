"""How far the implicit and the unrolled gradient are apart, by sharpness of the logits and rounds run.

    python -m benchmarks.sinkhorn_gradients

The converged gradient is that of the fixed point: implicit after enough rounds in float64.
"""

import torch

from onebasin.operator import sinkhorn


def gradient(logits, weights, **arguments):
    leaf = logits.detach().requires_grad_()
    plan, info = sinkhorn(leaf, return_info=True, **arguments)
    plan.backward(weights)
    return leaf.grad, info


def main(n: int = 64, num_problems: int = 4) -> None:
    print(f"n = {n}, normal logits, mean of {num_problems}; distances relative to the converged gradient")
    print("| scale | rounds | column error | saturation | unrolled - implicit | implicit | unrolled |")
    print("|---|---|---|---|---|---|---|")
    for scale in (1, 3, 6, 10, 20):
        generator = torch.Generator().manual_seed(0)
        shape = (num_problems, n, n)
        logits = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        converged, _ = gradient(logits, weights, num_iters=10_000, tol=1e-9)
        for rounds in (20, 100):
            implicit, info = gradient(logits, weights, num_iters=rounds)
            unrolled, _ = gradient(logits, weights, num_iters=rounds, gradient="unrolled")
            norms = converged.norm(dim=(-2, -1))
            apart = [
                ((left - right).norm(dim=(-2, -1)) / norms).mean()
                for left, right in ((unrolled, implicit), (implicit, converged), (unrolled, converged))
            ]
            print(
                f"| {scale} | {rounds} | {info.marginal_error.mean():.0e} | {info.saturation.mean():.0%} | "
                + " | ".join(f"{value:.1e}" for value in apart)
                + " |"
            )


if __name__ == "__main__":
    main()
