"""The autograd node: vmap, torch.func, torch.compile, memory, and what it leaves alone."""

import pytest
import torch
from torch.func import grad, jacrev, vmap

from onebasin.operator import sinkhorn


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient_of(logits, weights, **arguments):
    logits = logits.detach().requires_grad_()
    sinkhorn(logits, **arguments).backward(weights)
    return logits.grad


def loss(logits, weights, gradient="implicit"):
    return (sinkhorn(logits, 0.7, 50, gradient=gradient) * weights).sum()


def reference(logits, weights):
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(loss(logits, weights), logits)[0]


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
def test_grad_and_vmap(gradient):
    logits, weights = normal(3, 2, 6, 6), normal(3, 2, 6, 6, seed=1)
    expected = reference(logits, weights)
    derivative = grad(lambda x, w: loss(x, w, gradient))
    assert torch.allclose(derivative(logits, weights), expected)
    assert torch.allclose(vmap(derivative)(logits, weights), expected)
    assert torch.allclose(vmap(vmap(derivative))(logits, weights), expected)
    assert torch.allclose(vmap(derivative, (3, 3), 3)(logits.movedim(0, 3), weights.movedim(0, 3)), expected.movedim(0, 3))


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
def test_vmap_over_one_of_logits_and_weights(gradient):
    logits, weights = normal(6, 6), normal(4, 6, 6, seed=1)
    derivative = grad(lambda x, w: loss(x, w, gradient))
    assert torch.allclose(vmap(derivative, (None, 0))(logits, weights), reference(logits.expand(4, 6, 6), weights))
    swapped = vmap(derivative, (0, None))(weights, logits)
    assert torch.allclose(swapped, reference(weights, logits.expand(4, 6, 6)))


def test_vmap_gives_info_and_stops_by_itself():
    logits = torch.stack([normal(8, 8) * scale for scale in (0.1, 5.0)])
    for gradient in ("implicit", "unrolled"):
        rounds = vmap(lambda x, g=gradient: sinkhorn(x, 1, 60, 1e-6, g, return_info=True)[1].rounds)(logits)
        assert rounds.tolist()[0] == 4
        assert rounds.tolist()[1] > 4


def test_low_precision_under_transforms():
    logits, weights = normal(3, 6, 6).bfloat16(), normal(3, 6, 6, seed=1).bfloat16()
    derivative = grad(lambda x, w: (sinkhorn(x) * w).sum())
    expected = derivative(logits, weights)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(vmap(derivative)(logits, weights), expected)
    assert vmap(lambda x: sinkhorn(x, return_info=True)[1].saturation)(logits).shape == (3,)


def test_jacobian():
    logits = normal(4, 4)
    implicit = jacrev(lambda x: sinkhorn(x, num_iters=200))(logits)
    unrolled = jacrev(lambda x: sinkhorn(x, num_iters=200, gradient="unrolled"))(logits)
    assert torch.allclose(implicit, unrolled, atol=1e-9)


def test_nan_is_refused_under_grad_and_let_through_by_vmap():
    logits = torch.full((2, 3, 3), torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        grad(lambda x: sinkhorn(x).sum())(logits)
    assert vmap(sinkhorn)(logits).isnan().all()


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compile_without_a_graph_break():
    logits, weights = normal(2, 6, 6), normal(2, 6, 6, seed=1)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    inputs = logits.clone().requires_grad_()
    result = compiled(inputs, weights)
    result.backward()
    assert torch.allclose(result, loss(logits, weights))
    assert torch.allclose(inputs.grad, reference(logits, weights))
    assert compiled(torch.full_like(logits, torch.nan), weights).isnan()


def test_operators_are_described_faithfully_to_the_compiler():
    operators = torch.ops.onebasin
    for logits in (normal(3, 4, 4), normal(4, 4).bfloat16()):
        torch.library.opcheck(operators.sinkhorn_plan, (logits, 1.0, 20, None), test_utils="test_schema")
        torch.library.opcheck(operators.sinkhorn_plan, (logits, 1.0, 20, 1e-3), test_utils="test_faketensor")
    plan = sinkhorn(normal(3, 4, 4))
    sample = (plan, plan.sum(-2), normal(3, 4, 4), 1.0, 200)
    torch.library.opcheck(operators.sinkhorn_gradient, sample, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 256), (4, 256, 256), (64, 32, 32)])
def test_peak_memory_is_four_matrices(shape, dtype):
    """The incoming gradient included: plan, incoming gradient, result, and at most one matrix beside them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Peak(TorchDispatchMode):
        """Adds up what new storages hold, and takes it off when they die."""

        def __init__(self):
            super().__init__()
            self.live = self.peak = 0
            self.seen = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            import weakref

            result = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.seen:
                    storage, size = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
                    self.seen.add(storage.data_ptr())
                    self.live += size
                    weakref.finalize(storage, self._free, storage.data_ptr(), size)
            self.peak = max(self.peak, self.live)
            return result

        def _free(self, address, size):
            self.seen.discard(address)
            self.live -= size

    logits = normal(*shape).to(dtype).requires_grad_()
    matrix = logits.numel() * max(4, logits.element_size())  # of the type that is computed in
    with Peak() as mode:
        mode.seen.add(logits.untyped_storage().data_ptr())
        weights = torch.ones_like(logits)
        sinkhorn(logits).backward(weights)
    assert 2 * matrix < mode.peak <= 4 * matrix


@pytest.mark.parametrize("shape", [(7, 7), (3, 7, 7)])
def test_incoming_gradients_of_any_layout_are_left_alone(shape):
    logits = normal(*shape)
    for weights in [
        normal(*shape, seed=1),
        normal(*shape, seed=1).mT,
        normal(1, seed=1).expand(shape),
        torch.zeros(shape, dtype=torch.float64),
    ]:
        before = weights.clone()
        grad = gradient_of(logits, weights)
        assert torch.equal(weights, before)
        assert torch.equal(grad, gradient_of(logits, weights.contiguous()))
    assert torch.equal(grad, torch.zeros(shape, dtype=torch.float64))


def test_logits_and_plan_are_left_alone():
    logits = normal(9, 9).requires_grad_()
    before = logits.detach().clone()
    plan = sinkhorn(logits)
    kept = plan.detach().clone()
    plan.backward(torch.ones_like(plan), retain_graph=True)
    plan.backward(normal(9, 9, seed=1))
    assert torch.equal(plan, kept)
    assert torch.equal(logits.detach(), before)


def test_second_derivative_is_refused_with_the_way_out():
    logits, weights = normal(4, 4).requires_grad_(), normal(4, 4, seed=1)
    (grad,) = torch.autograd.grad((sinkhorn(logits) * weights).sum(), logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient='unrolled'"):
        grad.square().sum().backward()
    with pytest.raises(NotImplementedError, match="gradient='unrolled'"):
        torch.func.jacrev(torch.func.grad(lambda x: (sinkhorn(x) * weights).sum()))(logits.detach())
