import pytest
import torch

from onebasin.continual import Finetune
from onebasin.continual.stepping import interleave, run_steps
from tests.continual.clusters import TRAINING, make_mlp, make_task


@pytest.mark.parametrize("num_steps", [1, 99, 100, 101, 250])
def test_every_step_is_run_and_reported(num_steps):
    calls: list[int] = []
    reports = list(run_steps(lambda: calls.append(1), num_steps))
    assert len(calls) == num_steps
    assert reports == [*range(100, num_steps + 1, 100), *([num_steps] if num_steps % 100 else [])]


def test_runs_that_take_turns_do_not_see_each_other():
    alone = [Finetune(make_mlp(seed), seed=seed, **TRAINING) for seed in range(3)]
    together = [Finetune(make_mlp(seed), seed=seed, **TRAINING) for seed in range(3)]
    for strategy in alone:
        strategy.fit(make_task(1))
    interleave([strategy.learn(make_task(1)) for strategy in together], "cpu")
    for a, b in zip(alone, together, strict=True):
        for key, value in a.model.state_dict().items():
            assert torch.equal(value, b.model.state_dict()[key])


def test_runs_of_different_length():
    done: list[str] = []

    def count(name: str, length: int):
        for _ in range(length):
            done.append(name)
            yield None

    interleave([count("a", 1), count("b", 3), count("c", 0)], "cpu")
    assert done == ["a", "b", "b", "b"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_runs_have_made_can_be_read_at_once():
    made: list[torch.Tensor] = []

    def work():
        matrix = torch.eye(4000, device="cuda")
        for _ in range(50):
            matrix = matrix @ matrix
        made.append(matrix.sum())
        yield None

    interleave([work() for _ in range(3)], "cuda")
    assert [float(value) for value in made] == [4000.0] * 3
