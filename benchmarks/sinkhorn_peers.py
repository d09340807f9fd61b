"""The peers of the Sinkhorn operator, each as a pair of calls: forward, and forward with backward."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

Pair = tuple[Callable, Callable]


def load_authors() -> Callable[[Tensor, Tensor, int], Pair] | None:
    """The operator of PyPI's `sinkhorn-rebasin`, from its one file: the package itself wants torchvision."""
    spec = importlib.util.find_spec("rebasin")
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / "rebasinnet" / "sinkhorn.py" if folders else None
    if path is None or not path.exists():
        return None
    file_spec = importlib.util.spec_from_file_location("authors_sinkhorn", path)
    assert file_spec is not None
    assert file_spec.loader is not None
    module = importlib.util.module_from_spec(file_spec)
    file_spec.loader.exec_module(module)

    def pair(logits: Tensor, grad: Tensor, num_iters: int) -> Pair:
        ones = torch.ones(logits.shape[:-1], device=logits.device)
        leaf = logits.detach().clone().requires_grad_()

        def forward() -> Tensor:
            return module.Sinkhorn.apply(-logits, ones, ones, num_iters, 1.0)

        def both() -> Tensor:
            leaf.grad = None
            plan = module.Sinkhorn.apply(-leaf, ones, ones, num_iters, 1.0)
            plan.backward(grad.clone())  # it writes into what it is given
            return leaf.grad

        return forward, both

    return pair


def load_ott() -> Callable[[Tensor, Tensor, int], Pair] | None:
    """OTT's solver in JAX, compiled, with its implicit gradient, run for the same number of rounds."""
    if importlib.util.find_spec("ott") is None or importlib.util.find_spec("jax") is None:
        return None
    import jax
    from ott.geometry import geometry
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import implicit_differentiation, sinkhorn

    def pair(logits: Tensor, grad: Tensor, num_iters: int) -> Pair:
        n = logits.shape[-1]
        solver = sinkhorn.Sinkhorn(
            threshold=0.0,
            min_iterations=num_iters,
            max_iterations=num_iters,
            implicit_diff=implicit_differentiation.ImplicitDiff(),
        )

        @jax.jit
        def plan(x):  # its marginals are 1 / n
            return n * solver(linear_problem.LinearProblem(geometry.Geometry(-x, epsilon=1.0))).matrix

        @jax.jit
        def both(x, weights):
            return jax.vjp(plan, x)[1](weights)[0]

        x, weights = (jax.numpy.asarray(tensor.cpu().numpy()) for tensor in (logits, grad))

        def run_both() -> Tensor:
            return torch.from_dlpack(both(x, weights).block_until_ready())

        return lambda: plan(x).block_until_ready(), run_both

    return pair
