"""The plan as one node of the autograd graph, differentiated through the fixed point and not through the rounds."""

from typing import Any, Literal

import torch
from torch import Tensor

from onebasin.operator.adjoint import implicit_gradient
from onebasin.operator.rounds import Rounds, computing_dtype, run_log_rounds, run_rounds

Backend = Literal["torch", "triton"]


def choose_backend(tensor: Tensor) -> Backend:
    """Triton for the CUDA problems its kernels are made for, plain PyTorch for all others."""
    if not tensor.is_cuda:
        return "torch"
    from onebasin.operator import launching  # here, so that a machine without a GPU never looks for Triton

    return "triton" if launching.supports(tensor) else "torch"


def compute_plan(
    logits: Tensor, tau: float, num_iters: int, tol: float | None, backend: Backend | None = None
) -> Rounds:
    """Run the rounds on logits of any batch shape; the results have that batch shape."""
    shape, n = logits.shape, logits.shape[-1]
    problems = logits.reshape(-1, n, n)
    if (backend or choose_backend(problems)) == "triton":
        from onebasin.operator import launching

        plan, columns, rounds = launching.launch_rounds(problems, tau, num_iters, tol)
    elif _is_capturing(problems):
        plan, columns, rounds = run_log_rounds(problems, tau, num_iters, tol)
    else:
        plan, columns, rounds = run_rounds(problems, tau, num_iters, tol)
    return Rounds(plan.view(shape), columns.view(shape[:-1]), rounds.view(shape[:-2]))


def compute_gradient(
    plan: Tensor, columns: Tensor, grad: Tensor, tau: float, backend: Backend | None = None
) -> Tensor:
    """The gradient with respect to the logits of a plan of any batch shape, in the plan's type."""
    n = plan.shape[-1]
    problems = plan.reshape(-1, n, n), columns.reshape(-1, n), grad.to(plan.dtype).reshape(-1, n, n)
    if (backend or choose_backend(problems[0])) == "triton":
        from onebasin.operator import launching

        return launching.launch_gradient(*problems, tau).view(plan.shape)
    # A look is free on the CPU and a wait on the GPU, where a few steps too many cost less.
    read_every = 0 if _is_capturing(plan) else 8 if plan.is_cuda else 1
    return implicit_gradient(*problems, tau, read_every=read_every).view(plan.shape)


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


# A compiled program calls these two opaque operators, since the rounds read values back to decide how to go on.
# Eager code calls the functions above directly: the dispatch of a custom operator would cost more than a small plan.
@torch.library.custom_op("onebasin::sinkhorn_plan", mutates_args=())
def _plan_operator(
    logits: Tensor, tau: float, num_iters: int, tol: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(compute_plan(logits, tau, num_iters, tol))


@_plan_operator.register_fake
def _(logits: Tensor, tau: float, num_iters: int, tol: float | None) -> tuple[Tensor, Tensor, Tensor]:
    plan = logits.new_empty(logits.shape, dtype=computing_dtype(logits.dtype))
    return plan, plan.new_empty(logits.shape[:-1]), plan.new_empty(logits.shape[:-2], dtype=torch.int64)


@torch.library.custom_op("onebasin::sinkhorn_gradient", mutates_args=())
def _gradient_operator(plan: Tensor, columns: Tensor, grad: Tensor, tau: float) -> Tensor:
    return compute_gradient(plan, columns, grad, tau)


@_gradient_operator.register_fake
def _(plan: Tensor, columns: Tensor, grad: Tensor, tau: float) -> Tensor:
    return plan.new_empty(plan.shape)


class ImplicitSinkhorn(torch.autograd.Function):
    """Logits to plan, column sums and rounds; the plan is in the computing type."""

    @staticmethod
    def forward(
        logits: Tensor, tau: float, num_iters: int, tol: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _plan_operator if torch.compiler.is_compiling() else compute_plan
        plan, columns, rounds = run(logits, tau, num_iters, tol)
        return plan, columns, rounds

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        plan, columns, rounds = output
        ctx.mark_non_differentiable(columns, rounds)
        ctx.save_for_backward(plan, columns)
        ctx.tau, ctx.dtype = inputs[1], inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None, None]:
        plan, columns = ctx.saved_tensors
        return SinkhornAdjoint.apply(plan, columns, grad, ctx.tau).to(ctx.dtype), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, logits: Tensor, tau: float, num_iters: int, tol: float | None
    ) -> tuple:
        outputs = ImplicitSinkhorn.apply(logits.movedim(in_dims[0], 0), tau, num_iters, tol)
        return outputs, (0, 0, 0)


class SinkhornAdjoint(torch.autograd.Function):
    """The backward pass as a node of its own: it can be batched by vmap, and it says why it has no derivative."""

    @staticmethod
    def forward(plan: Tensor, columns: Tensor, grad: Tensor, tau: float) -> Tensor:
        run = _gradient_operator if torch.compiler.is_compiling() else compute_gradient
        return run(plan, columns, grad, tau)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        raise NotImplementedError(
            "sinkhorn(gradient='implicit') has a first derivative only, and a second one was asked for "
            "(create_graph=True, a Hessian, a gradient penalty). Use gradient='unrolled', which can be "
            "differentiated any number of times."
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple, plan: Tensor, columns: Tensor, grad: Tensor, tau: float) -> tuple:
        tensors = [
            tensor.unsqueeze(0).expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((plan, columns, grad), in_dims, strict=False)
        ]
        return SinkhornAdjoint.apply(*tensors, tau), 0
