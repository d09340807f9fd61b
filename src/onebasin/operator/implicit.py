# pyright: reportIncompatibleMethodOverride=false
"""The plan as one node of the autograd graph, differentiated through the fixed point, not the rounds."""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor

from onebasin.operator.adjoint import MAX_STEPS, implicit_gradient
from onebasin.operator.rounds import Rounds, computing_dtype, run_log_rounds, run_rounds
from onebasin.torch_internals import is_transformed

Backend = Literal["torch", "triton"]


def choose_backend(tensor: Tensor) -> Backend:
    """Triton for the CUDA problems its kernels are made for, plain PyTorch for all others."""
    if not tensor.is_cuda:
        return "torch"
    from onebasin.operator import launching  # here, so that a machine without a GPU never looks for Triton

    return "triton" if launching.supports(tensor) else "torch"


def compute_plan(logits: Tensor, tau: float, num_iters: int, tol: float | None, backend: Backend | None = None) -> Rounds:
    """Run the rounds on logits of any batch shape; the results have that batch shape."""
    shape, n = logits.shape, logits.shape[-1]
    if logits.numel() == 0:
        return Rounds(*_empty_results(logits))
    problems = logits if logits.ndim == 2 else logits.reshape(-1, n, n)
    if (backend or choose_backend(problems)) == "triton":
        from onebasin.operator import launching

        with torch.cuda.device(problems.device):
            plan, columns, rounds = launching.launch_rounds(problems, tau, num_iters, tol)
    elif _is_capturing(problems):
        plan, columns, rounds = run_log_rounds(problems, tau, num_iters, tol)
    elif _is_one_by_one(problems):
        plan = torch.empty(problems.shape, dtype=computing_dtype(logits.dtype))
        runs = [run_rounds(each, tau, num_iters, tol, out=plan[i]) for i, each in enumerate(problems)]
        columns = torch.stack([run.columns for run in runs])
        rounds = torch.stack([run.rounds for run in runs])
    else:
        plan, columns, rounds = run_rounds(problems, tau, num_iters, tol)
    return Rounds(plan.view(shape), columns.view(shape[:-1]), rounds.view(shape[:-2]))


def compute_gradient(
    plan: Tensor, columns: Tensor, grad: Tensor, tau: float, backend: Backend | None = None, max_steps: int = MAX_STEPS
) -> Tensor:
    """The gradient with respect to the logits of a plan of any batch shape, in the plan's type.

    The incoming gradient may be of a lower precision than the plan.
    """
    if plan.numel() == 0:
        return torch.empty_like(plan)
    n, problems = plan.shape[-1], (plan, columns, grad)
    if plan.ndim > 2:
        problems = plan.reshape(-1, n, n), columns.reshape(-1, n), grad.reshape(-1, n, n)
    if (backend or choose_backend(problems[0])) == "triton":
        from onebasin.operator import launching

        with torch.cuda.device(plan.device):
            result = launching.launch_gradient(*problems, tau, max_steps=max_steps)
    elif _is_one_by_one(problems[0]):
        result = torch.empty_like(problems[0])
        for each in zip(*problems, result, strict=True):
            implicit_gradient(*each[:3], tau, out=each[3], max_steps=max_steps)
    else:
        # A look is free on the CPU and a wait on the GPU, where a few steps too many cost less.
        read_every = 0 if _is_capturing(plan) else 8 if plan.is_cuda else 1
        result = implicit_gradient(*problems, tau, read_every=read_every, max_steps=max_steps)
    return result.view(plan.shape)


def _is_one_by_one(problems: Tensor) -> bool:
    """Whether to take a batch in turn: on the CPU a large problem does better with the cache to itself."""
    return not problems.is_cuda and problems.ndim == 3 and (len(problems) == 1 or problems.shape[-1] >= 128)


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _empty_results(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    plan = logits.new_empty(logits.shape, dtype=computing_dtype(logits.dtype))
    return plan, plan.new_empty(logits.shape[:-1]), plan.new_empty(logits.shape[:-2], dtype=torch.int64)


# A compiled program calls these two opaque operators, since the rounds read values back to decide what to do.
# Eager code calls the functions above: the dispatch of a custom operator costs more than a small plan.
@torch.library.custom_op("onebasin::sinkhorn_plan", mutates_args=())
def _plan_operator(logits: Tensor, tau: float, num_iters: int, tol: float | None) -> tuple[Tensor, Tensor, Tensor]:
    plan, columns, rounds = compute_plan(logits, tau, num_iters, tol)
    return plan, columns, rounds


@_plan_operator.register_fake
def _(logits: Tensor, tau: float, num_iters: int, tol: float | None) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(logits)


@torch.library.custom_op("onebasin::sinkhorn_gradient", mutates_args=())
def _gradient_operator(plan: Tensor, columns: Tensor, grad: Tensor, tau: float, max_steps: int) -> Tensor:
    return compute_gradient(plan, columns, grad, tau, max_steps=max_steps)


@_gradient_operator.register_fake
def _(plan: Tensor, columns: Tensor, grad: Tensor, tau: float, max_steps: int) -> Tensor:
    return plan.new_empty(plan.shape)


def plan_implicitly(
    logits: Tensor, tau: float, num_iters: int, tol: float | None, max_steps: int = MAX_STEPS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The plan in the type of the logits, with the implicit gradient, and `compute_plan`'s without one."""
    plan, solution, columns, rounds = _Plan.apply(logits, tau, num_iters, tol, max_steps)  # pyright: ignore
    return plan, plan.detach() if _is_computing(logits) else solution, columns, rounds


def _is_computing(logits: Tensor) -> bool:
    return logits.dtype == computing_dtype(logits.dtype)


class _Plan(torch.autograd.Function):
    """Logits to the plan in their type, that in the computing type if it is another, column sums, rounds."""

    @staticmethod
    def forward(
        logits: Tensor, tau: float, num_iters: int, tol: float | None, max_steps: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = _plan_operator if torch.compiler.is_compiling() else compute_plan
        plan, columns, rounds = run(logits, tau, num_iters, tol)
        if _is_computing(logits):
            return plan, columns.new_empty(0), columns, rounds
        return plan.to(logits.dtype), plan, columns, rounds

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        plan, solution, columns, rounds = output
        ctx.mark_non_differentiable(solution, columns, rounds)
        ctx.set_materialize_grads(False)  # no zeros for the outputs that have no gradient
        ctx.save_for_backward(plan if _is_computing(inputs[0]) else solution, columns)
        ctx.tau, ctx.max_steps, ctx.dtype = inputs[1], inputs[4], inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None, None]:
        if grad is None:
            return None, None, None, None, None
        plan, columns = ctx.saved_tensors
        # A node is needed only where something else may differentiate or batch it.
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or is_transformed(grad):
            result = _Adjoint.apply(plan, columns, grad, ctx.tau, ctx.max_steps)  # pyright: ignore
        else:
            result = compute_gradient(plan, columns, grad, ctx.tau, max_steps=ctx.max_steps)
        return result.to(ctx.dtype), None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, logits: Tensor, tau: float, num_iters: int, tol: float | None, max_steps: int
    ) -> tuple:
        outputs = _Plan.apply(logits.movedim(in_dims[0], 0), tau, num_iters, tol, max_steps)
        return outputs, (0, None if _is_computing(logits) else 0, 0, 0)


# Function.apply inspects this signature at each call, which takes longer than reading it off.
_Plan.forward.__signature__ = inspect.signature(_Plan.forward)  # pyright: ignore


class _Adjoint(torch.autograd.Function):
    """The backward pass as a node of its own: vmap can batch it, and it says why it has no derivative."""

    @staticmethod
    def forward(plan: Tensor, columns: Tensor, grad: Tensor, tau: float, max_steps: int) -> Tensor:
        run = _gradient_operator if torch.compiler.is_compiling() else compute_gradient
        return run(plan, columns, grad, tau, max_steps=max_steps)

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
    def vmap(info: Any, in_dims: tuple, plan: Tensor, columns: Tensor, grad: Tensor, tau: float, max_steps: int) -> tuple:
        tensors = [
            tensor.unsqueeze(0).expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((plan, columns, grad), in_dims, strict=False)
        ]
        return _Adjoint.apply(*tensors, tau, max_steps), 0
