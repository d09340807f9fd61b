"""Through Avalanche as by ourselves. Runs where Avalanche is installed: ``make avalanche``."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import onebasin as ob
from onebasin import continual

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    benchmarks = pytest.importorskip("avalanche.benchmarks")
    from avalanche.benchmarks.utils import as_classification_dataset
    from avalanche.evaluation.metrics import accuracy_metrics
    from avalanche.training.plugins import EvaluationPlugin

    from onebasin.continual.avalanche import AvalancheTemplate, read_task

pytestmark = pytest.mark.filterwarnings("ignore")  # Avalanche's own


def make_benchmark(stream: continual.Stream):
    def convert(task: continual.Task):
        dataset = TensorDataset(task.inputs, task.targets)
        dataset.targets = task.targets.tolist()
        return as_classification_dataset(dataset)

    datasets = {"train": list(map(convert, stream.train)), "test": list(map(convert, stream.test))}
    return benchmarks.with_classes_timeline(benchmarks.benchmark_from_datasets(**datasets))


def make_strategy(kind: str) -> continual.Strategy:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    options = {"batch_size": 50, "epochs": 1}
    if kind == "replay":
        return continual.Replay(model, **options)
    return continual.RebasinStrategy(model, ob.symmetry(model, torch.rand(2, 1, 8, 8)), noise=0.1, **options)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("kind", ["replay", "rebasin"])
def test_the_same_network_and_the_same_accuracy(kind, heads):
    stream = continual.split_digits(5, heads=True).first(3) if heads else continual.rotated_digits(3)
    ours = make_strategy(kind)
    matrix = continual.run_stream(ours, stream)
    evaluator = EvaluationPlugin(accuracy_metrics(experience=True), loggers=[])
    template = AvalancheTemplate(make_strategy(kind), heads=heads, evaluator=evaluator)
    benchmark = make_benchmark(stream)
    for experience in benchmark.train_stream:
        template.train(experience, eval_streams=[])
    for a, b in zip(ours.model.parameters(), template.model.parameters(), strict=True):
        assert torch.equal(a, b)
    results = template.eval(benchmark.test_stream)
    found = [value for name, value in sorted(results.items()) if name.startswith("Top1_Acc_Exp")]
    assert found == pytest.approx(list(matrix.rows[-1]), abs=1e-6)


def test_an_experience_is_read_whole():
    stream = continual.split_digits(5)
    experience = list(make_benchmark(stream).train_stream)[1]
    task = read_task(experience, heads=True)
    assert torch.equal(task.inputs, stream.train[1].inputs)
    assert torch.equal(task.targets, stream.train[1].targets)
    assert task.classes == (2, 3)
