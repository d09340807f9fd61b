import torch

from onebasin.tracing.verification import _Interpreter


def test_a_view_of_other_strides_than_were_recorded_is_copied():
    """Attention on a GPU returns other strides in float64 than in the type it was recorded in."""
    graph = torch.fx.Graph()
    flat = graph.call_function(torch.ops.aten.view.default, (graph.placeholder("x"), [6]))
    graph.output(flat)
    transposed = torch.arange(6.0).view(2, 3).t()
    found = _Interpreter(torch.fx.GraphModule({}, graph)).run(transposed)
    assert found.tolist() == [0, 3, 1, 4, 2, 5]
