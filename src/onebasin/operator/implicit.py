# pyright: reportIncompatibleMethodOverride=false
"""The plan as one node of the autograd graph, which differentiates the fixed point and not the rounds."""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor

from onebasin.operator import launch
from onebasin.operator.adjoint import MAX_STEPS, implicit_gradient
from onebasin.operator.rounds import Rounds, computing_dtype, run_log_rounds, run_rounds
from onebasin.torch_internals import is_transformed

Backend = Literal["torch", "triton"]


def choose_backend(tensor: Tensor) -> Backend:
    """Triton for the CUDA problems its kernels are made for, plain PyTorch for all others."""
    return "triton" if tensor.is_cuda and launch.supports(tensor) else "torch"


def compute_plan(logits: Tensor, tau: float, num_iters: int, tol: float | None, backend: Backend | None = None) -> Rounds:
    """Run the rounds on logits of any batch shape; the results have that batch shape."""
    shape, n = logits.shape, logits.shape[-1]
    if logits.numel() == 0:
        return Rounds(*_empty_results(logits))
    problems = logits if logits.ndim == 2 else logits.reshape(-1, n, n)
    if (backend or choose_backend(problems)) == "triton":
        with torch.cuda.device(problems.device):
            plan, column_sums, rounds = launch.launch_rounds(problems, tau, num_iters, tol)
    elif _is_capturing(problems):
        plan, column_sums, rounds = run_log_rounds(problems, tau, num_iters, tol)
    elif _solves_one_by_one(problems):
        plan = torch.empty(problems.shape, dtype=computing_dtype(logits.dtype))
        runs = [run_rounds(each, tau, num_iters, tol, out=plan[i]) for i, each in enumerate(problems)]
        column_sums = torch.stack([run.column_sums for run in runs])
        rounds = torch.stack([run.rounds for run in runs])
    else:
        plan, column_sums, rounds = run_rounds(problems, tau, num_iters, tol)
    return Rounds(plan.view(shape), column_sums.view(shape[:-1]), rounds.view(shape[:-2]))


def compute_gradient(
    plan: Tensor, column_sums: Tensor, grad: Tensor, tau: float, backend: Backend | None = None, max_steps: int = MAX_STEPS
) -> Tensor:
    """The gradient with respect to the logits of a plan of any batch shape, in the plan's type.

    The incoming gradient may be of a lower precision than the plan.
    """
    if plan.numel() == 0:
        return torch.empty_like(plan)
    n, problems = plan.shape[-1], (plan, column_sums, grad)
    if plan.ndim > 2:
        problems = plan.reshape(-1, n, n), column_sums.reshape(-1, n), grad.reshape(-1, n, n)
    if (backend or choose_backend(problems[0])) == "triton":
        with torch.cuda.device(plan.device):
            result = launch.launch_gradient(*problems, tau, max_steps=max_steps)
    elif _solves_one_by_one(problems[0]):
        result = torch.empty_like(problems[0])
        for each in zip(*problems, result, strict=True):
            implicit_gradient(*each[:3], tau, out=each[3], max_steps=max_steps)
    else:
        # Checking is free on the CPU. On the GPU it waits for the device, which costs more than a few steps too many.
        read_every = 0 if _is_capturing(plan) else 8 if plan.is_cuda else 1
        result = implicit_gradient(*problems, tau, read_every=read_every, max_steps=max_steps)
    return result.view(plan.shape)


def _solves_one_by_one(problems: Tensor) -> bool:
    """Whether to solve the problems of a batch in turn: on the CPU, a large one is faster with the cache to itself."""
    return not problems.is_cuda and problems.ndim == 3 and (len(problems) == 1 or problems.shape[-1] >= 128)


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _empty_results(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    plan = logits.new_empty(logits.shape, dtype=computing_dtype(logits.dtype))
    return plan, plan.new_empty(logits.shape[:-1]), plan.new_empty(logits.shape[:-2], dtype=torch.int64)


# A compiled program calls these two opaque operators, because the rounds branch on values that they read back.
# Eager code calls the functions above: the dispatch of a custom operator costs more than a small plan.
@torch.library.custom_op("onebasin::sinkhorn_plan", mutates_args=())
def _plan_operator(logits: Tensor, tau: float, num_iters: int, tol: float | None) -> tuple[Tensor, Tensor, Tensor]:
    plan, column_sums, rounds = compute_plan(logits, tau, num_iters, tol)
    return plan, column_sums, rounds


@_plan_operator.register_fake
def _(logits: Tensor, tau: float, num_iters: int, tol: float | None) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(logits)


@torch.library.custom_op("onebasin::sinkhorn_gradient", mutates_args=())
def _gradient_operator(plan: Tensor, column_sums: Tensor, grad: Tensor, tau: float, max_steps: int) -> Tensor:
    return compute_gradient(plan, column_sums, grad, tau, max_steps=max_steps)


@_gradient_operator.register_fake
def _(plan: Tensor, column_sums: Tensor, grad: Tensor, tau: float, max_steps: int) -> Tensor:
    return plan.new_empty(plan.shape)


def plan_implicitly(
    logits: Tensor, tau: float, num_iters: int, tol: float | None, max_steps: int = MAX_STEPS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The plan in the type of the logits, with the implicit gradient, and the results of `compute_plan` without one."""
    plan, solution, column_sums, rounds = _Plan.apply(logits, tau, num_iters, tol, max_steps)  # pyright: ignore
    return plan, plan.detach() if _has_computing_dtype(logits) else solution, column_sums, rounds


def _has_computing_dtype(logits: Tensor) -> bool:
    return logits.dtype == computing_dtype(logits.dtype)


class _Plan(torch.autograd.Function):
    """Logits to four outputs: the plan in their type, the plan in the computing type if it differs, column sums, rounds."""

    @staticmethod
    def forward(
        logits: Tensor, tau: float, num_iters: int, tol: float | None, max_steps: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = _plan_operator if torch.compiler.is_compiling() else compute_plan
        plan, column_sums, rounds = run(logits, tau, num_iters, tol)
        if _has_computing_dtype(logits):
            return plan, column_sums.new_empty(0), column_sums, rounds
        return plan.to(logits.dtype), plan, column_sums, rounds

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        plan, solution, column_sums, rounds = output
        ctx.mark_non_differentiable(solution, column_sums, rounds)
        ctx.set_materialize_grads(False)  # no zeros for the outputs that have no gradient
        ctx.save_for_backward(plan if _has_computing_dtype(inputs[0]) else solution, column_sums)
        ctx.tau, ctx.max_steps, ctx.dtype = inputs[1], inputs[4], inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None, None]:
        if grad is None:
            return None, None, None, None, None
        plan, column_sums = ctx.saved_tensors
        # A node of its own is needed only where this pass may itself be differentiated or batched.
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or is_transformed(grad):
            result = _Adjoint.apply(plan, column_sums, grad, ctx.tau, ctx.max_steps)  # pyright: ignore
        else:
            result = compute_gradient(plan, column_sums, grad, ctx.tau, max_steps=ctx.max_steps)
        return result.to(ctx.dtype), None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, logits: Tensor, tau: float, num_iters: int, tol: float | None, max_steps: int
    ) -> tuple:
        outputs = _Plan.apply(logits.movedim(in_dims[0], 0), tau, num_iters, tol, max_steps)
        return outputs, (0, None if _has_computing_dtype(logits) else 0, 0, 0)


# Function.apply inspects the signature at each call; a stored one saves that time.
_Plan.forward.__signature__ = inspect.signature(_Plan.forward)  # pyright: ignore


class _Adjoint(torch.autograd.Function):
    """The backward pass as a node of its own, which vmap can batch and whose error explains the missing derivative."""

    @staticmethod
    def forward(plan: Tensor, column_sums: Tensor, grad: Tensor, tau: float, max_steps: int) -> Tensor:
        run = _gradient_operator if torch.compiler.is_compiling() else compute_gradient
        return run(plan, column_sums, grad, tau, max_steps=max_steps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        raise NotImplementedError(
            "sinkhorn(gradient='implicit') has a first derivative only, and a second one was asked for "
            "(create_graph=True, a Hessian, a gradient penalty). Use gradient='unrolled', which can be "
            "differentiated any number of times."
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, plan: Tensor, column_sums: Tensor, grad: Tensor, tau: float, max_steps: int
    ) -> tuple:
        tensors = [
            tensor.unsqueeze(0).expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((plan, column_sums, grad), in_dims, strict=False)
        ]
        return _Adjoint.apply(*tensors, tau, max_steps), 0
