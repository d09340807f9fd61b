import pytest
import torch
from torch import nn

from onebasin import continual
from onebasin.continual import Finetune, interleave, run_stream
from tests.continual.clusters import TRAINING, make_mlp, make_task


def test_a_stream_from_start_to_end_and_in_two_parts():
    stream = continual.rotated_digits(3)

    def make():
        torch.manual_seed(0)
        return Finetune(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)), epochs=1)

    seen = []
    whole = run_stream(make(), stream, after=seen.append)
    assert [matrix.num_tasks for matrix in seen] == [1, 2, 3]
    assert [len(row) for row in whole.rows] == [1, 2, 3]
    strategy = make()
    part = run_stream(strategy, stream.first(1))
    with pytest.raises(ValueError, match="give start="):
        run_stream(strategy, stream)
    assert run_stream(strategy, stream, start=part).rows == whole.rows


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
