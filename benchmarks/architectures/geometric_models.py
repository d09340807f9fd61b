"""Graph networks of PyG: two layers of each convolution between linear ones, and its ready models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.architecture import Architecture, Example, NotMade

_WIDTH = 16


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 12), nn.ReLU(), nn.Linear(12, outputs))


# What each convolution takes beside its widths; "edges" are features of edges.
_CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "AGNNConv": {"widths": False},
    "APPNP": {"widths": False, "K": 3, "alpha": 0.1},
    "ARMAConv": {"num_stacks": 2},
    "AntiSymmetricConv": {"widths": 1},
    "CGConv": {"widths": 1},
    "ChebConv": {"K": 3},
    "ClusterGCNConv": {},
    "EGConv": {"num_heads": 4, "num_bases": 2},
    "EdgeConv": {"nn": 2},
    "FAConv": {"widths": 1, "twice": True},
    "FeaStConv": {"heads": 2},
    "FiLMConv": {},
    "GATConv": {"heads": 4, "concat": False},
    "GATv2Conv": {"heads": 4, "concat": False},
    "GCN2Conv": {"widths": 1, "alpha": 0.1, "twice": True},
    "GCNConv": {},
    "GENConv": {},
    "GINConv": {"nn": 1},
    "GINEConv": {"nn": 1, "edge_dim": 5, "edges": True},
    "GMMConv": {"dim": 5, "kernel_size": 3, "edges": True},
    "GatedGraphConv": {"widths": 1, "num_layers": 2},
    "GeneralConv": {},
    "GraphConv": {},
    "LEConv": {},
    "LGConv": {"widths": False},
    "MFConv": {},
    "MixHopConv": {"powers": [0, 1], "half": True},
    "NNConv": {"nn": "edges", "edges": True},
    "PANConv": {"filter_size": 2},
    "PDNConv": {"edge_dim": 5, "hidden_channels": 6, "edges": True},
    "ResGatedGraphConv": {},
    "SAGEConv": {},
    "SGConv": {"K": 2},
    "SSGConv": {"alpha": 0.1, "K": 2},
    "SimpleConv": {"widths": False},
    "SuperGATConv": {"heads": 4, "concat": False},
    "TAGConv": {},
    "TransformerConv": {"heads": 4, "concat": False},
}
_MODELS = ("GCN", "GAT", "GIN", "GraphSAGE", "EdgeCNN", "PMLP", "GraphUNet")


class Graph(nn.Module):
    """A linear layer, two convolutions, a linear layer."""

    def __init__(self, convolutions: list[nn.Module], takes_edges: bool, takes_first: bool):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, _WIDTH), nn.Linear(_WIDTH, 3)
        self.convolutions = nn.ModuleList(convolutions)
        self.takes_edges, self.takes_first = takes_edges, takes_first

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Scores of nodes."""
        x = first = self.enter(x).relu()
        for convolution in self.convolutions:
            between = (first,) if self.takes_first else ()
            x = convolution(x, *between, edge_index, *((edge_attr,) if self.takes_edges else ())).relu()
        return self.leave(x)


class OnGraph(nn.Module):
    """A ready model as a function of nodes and edges, read by a linear layer."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.leave = model, nn.Linear(_WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Scores of nodes."""
        return self.leave(self.model(x, edge_index))


def _draw_graph(batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """A graph of batch x length nodes, each with three edges that leave it."""
    nodes = batch * length
    edges = torch.stack([torch.arange(nodes).repeat(3), torch.randint(0, nodes, (3 * nodes,))])
    return torch.randn(nodes, 6), edges, torch.randn(3 * nodes, 5)


def geometric_architectures() -> Iterator[Architecture]:
    """Convolutions, then models."""
    for name in _CONVOLUTIONS:
        yield Architecture("PyG", name, lambda name=name: _make_convolution(name))
    for name in _MODELS:
        yield Architecture("PyG", name, lambda name=name: _make_model(name))


def _make_convolution(name: str) -> Example:
    import torch_geometric.nn

    options = dict(_CONVOLUTIONS[name])
    widths, edges, twice = (options.pop(k, d) for k, d in (("widths", 2), ("edges", False), ("twice", False)))
    sizes = [_WIDTH] * int(widths) if widths is not False else []
    if options.pop("half", False):
        sizes[-1] //= 2
    network = options.pop("nn", None)
    if network == "edges":
        options["nn"] = _mlp(5, _WIDTH * _WIDTH)
    elif network:
        options["nn"], sizes = _mlp(network * _WIDTH, _WIDTH), []
    try:
        convolutions = [getattr(torch_geometric.nn, name)(*sizes, **options) for _ in range(2)]
        model = Graph(convolutions, edges, twice).eval()
        with torch.no_grad():
            model(*_draw_graph(2, 6))
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {error}") from error
    return Example(model, _draw_graph, 6, (9,))


def _make_model(name: str) -> Example:
    import torch_geometric.nn

    options: dict[str, Any] = {"num_layers": 2}
    if name == "GraphUNet":
        options = {"depth": 2, "pool_ratios": 0.5}
    try:
        model = OnGraph(getattr(torch_geometric.nn.models, name)(6, 12, out_channels=_WIDTH, **options)).eval()
        with torch.no_grad():
            model(*_draw_graph(2, 6))
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {error}") from error
    return Example(model, _draw_graph, 6, (9,))
