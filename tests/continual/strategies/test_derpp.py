import torch
from torch.nn import functional

from onebasin import continual
from tests.continual.clusters import TRAINING, make_mlp, make_task


def test_der_adds_the_distance_to_the_stored_outputs():
    strategy = continual.DERPlusPlus(make_mlp(), alpha=0.3, beta=0.6, memory_per_class=2, **TRAINING)
    first, second = make_task(0), make_task(1, count=20)
    strategy.fit(first)
    memory, outputs = strategy.memory.samples, strategy.model(strategy.memory.samples.inputs).detach()
    with torch.no_grad():
        for parameter in strategy.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    strategy.open_feeds(strategy._add_task(second), 1)
    output = strategy.model(memory.inputs)
    expected = (
        functional.cross_entropy(strategy.model(second.inputs), second.targets)
        + 0.6 * functional.cross_entropy(output, memory.targets)
        + 0.3 * (output - outputs).square().mean()
    )
    torch.testing.assert_close(strategy.cost(), expected)
