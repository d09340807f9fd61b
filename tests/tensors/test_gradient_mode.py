"""What computes gradients does so inside of ``no_grad`` too."""

import contextlib

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin import continual
from onebasin.tensors.gradient_mode import computing_gradients

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DATA = [(X, torch.arange(32) % 2)]
LOSS = nn.functional.cross_entropy
OFF = [torch.no_grad, torch.inference_mode]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
    ).eval()


A, B, C = (network(seed) for seed in range(3))
CALLS = {
    "align": lambda: ob.align(B, to=A, example_inputs=X, steps=5).model,
    "merge": lambda: ob.merge([B, A], data=DATA, objective=ob.Midpoint(LOSS), kinds="positive", scaling=ob.Scaling(steps=3)),
    "canonical": lambda: ob.canonical(A, X).model,
    "port": lambda: ob.port(C, base=B, to=A, example_inputs=X, steps=5).model,
    "synthetic_data": lambda: ob.synthetic_data([A], shape=(4,), num_batches=1, batch_size=8, steps=2)[0][0],
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("off", OFF)
def test_a_call_inside_of_no_grad_gives_the_same(call, off):
    expected = CALLS[call]()
    with off():
        found = CALLS[call]()
        assert not torch.is_grad_enabled()
    if isinstance(expected, nn.Module):
        expected, found = (dict(model.state_dict()) for model in (expected, found))
    torch.testing.assert_close(found, expected)


def test_a_task_is_learned_inside_of_no_grad():
    task = continual.Task(*DATA[0])
    states = []
    for mode in (contextlib.nullcontext, torch.no_grad):
        strategy = continual.Finetune(network(0), epochs=2, batch_size=8)
        with mode():
            strategy.fit(task)
        states.append(strategy.model.state_dict())
    torch.testing.assert_close(*states)


def test_the_mode_is_as_it_was_while_a_generator_rests():
    @computing_gradients
    def count():
        for number in range(2):
            assert torch.is_grad_enabled()
            yield number

    with torch.no_grad():
        for _ in count():
            assert not torch.is_grad_enabled()
