"""What a user might write: `test_types` checks it strictly, runs it, and compares the types that it declares."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(x)))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def own_objective(params: dict[str, Tensor], target: dict[str, Tensor], batch: tuple[Tensor, Tensor] | None) -> Tensor:
    return (params["hidden.weight"] - target["hidden.weight"]).square().sum()


def evaluate(model: nn.Module) -> dict[str, float]:
    return {"loss": float(loss(model(x), y)), "accuracy": 1.0}


x, y = torch.randn(16, 4), torch.zeros(16, dtype=torch.long)
data = [(x, y)]
a, b = Net(), Net()

symmetry = ob.symmetry(a, x)
sizes: dict[str, int] = {name: group.size for name, group in symmetry.groups.items()}
reasons: list[str] = [f"{place}: {why}" for place, why in symmetry.pinned.items()]
symmetry.verify(b, x)
permutation = symmetry.random(torch.Generator().manual_seed(0))
index: Tensor = permutation[next(iter(symmetry.groups))]
again = permutation.inverse() @ permutation
assert again == symmetry.identity()
b.load_state_dict(permutation.apply(b))
permutation.save("p.safetensors")
loaded = ob.Permutation.load("p.safetensors")
by_hand = ob.Symmetry.from_axes({"hidden.weight": "h i", "head.weight": "o h"}, free=["h"])

plan: Tensor = ob.sinkhorn(torch.randn(3, 5, 5), tau=0.5, num_iters=10)
columns: Tensor = ob.assign(plan)
columns, info = ob.assign(plan, return_info=True)
duals: Tensor = info.row_duals
plan, report = ob.sinkhorn(plan, return_info=True)

result = ob.align(b, to=a, symmetry=symmetry, method=ob.Sinkhorn(steps=3), objective=ob.Midpoint(loss), data=data)
result = ob.align(b, to=a, example_inputs=x, method="weight-matching", max_sweeps=3)
result = ob.align(b, to=a, symmetry=symmetry, objective=own_objective, steps=3, init="weight-matching")
result = ob.align(
    b, to=a, data=data, objective=ob.RandomPoint(loss, low=0.3, high=0.7), kinds="all", scaling=ob.Scaling(steps=5)
)
aligned: Net = result.model
out: Tensor = aligned(x)
weight: Tensor = result.model.hidden.weight
target: Net = result.target
costs: tuple[float, float] = (result.start_cost, result.cost)
text: list[str] = [result.method, *result.notes]
done: bool = result.converged
for entry in result.history:
    print(entry.get("step"))
transform: ob.Transform = result.transform
scales: dict[str, Tensor] = result.scales
found = ob.align(b.state_dict(), to=a.state_dict(), symmetry=symmetry)
state: dict[str, Any] = found.model


def summarise(alignment: ob.Alignment[Net]) -> str:
    return f"{alignment.cost:.3f} after {alignment.seconds:.1f} s"


print(summarise(result))

merged: Net = ob.merge([a, b], symmetry=symmetry, weights=[0.5, 0.5], reference="mean", repair="repair", data=data)
wider: Net = ob.widen(a, like=b, example_inputs=x)
ported = ob.port(b, base=a, to=b, example_inputs=x, scale=[0.5, 1.0], evaluate=evaluate)
tuned: Net = ported.model
inner: Net = ported.alignment.model
form = ob.canonical(a, x)
folded: Net = form.model
canonical: Mapping[str, Any] = form.state
mean = ob.interpolate([a, b], [0.5, 0.5])
a.load_state_dict(mean)
a.load_state_dict(ob.reset_batch_norm(a, data))
repaired = ob.repair(merged, [a, b], data, symmetry)

path = ob.linear_path(a, result.model, evaluate, num_points=5)
barrier, area, losses = path.barrier, path.auc, path.losses
accuracies: list[float] = path.metrics["accuracy"]
plane = ob.loss_plane(a, b, result.model, evaluate, resolution=5)
lowest: float = min(map(min, plane.losses))

net = ob.RebasinNet(b, symmetry)
soft: dict[str, Tensor] = net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
hard: ob.Permutation = net.permutation()

stream = ob.continual.rotated_digits(num_tasks=2)
classifier = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
units = ob.symmetry(classifier, stream.train[0].inputs[:2])
strategy = ob.continual.RebasinStrategy(classifier, units, epochs=1, optimizer=ob.continual.sgd(0.1))
matrix = ob.continual.run_stream(strategy, stream)
print(matrix.average, matrix.forgetting)
learner: nn.Module = strategy.model
indices: dict[str, Tensor] = hard.indices
logarithms: dict[str, Tensor] = transform.logarithms
tau: float = net.tau
