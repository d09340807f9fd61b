import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import onebasin as ob
from onebasin.landscape.paths import LinearPath, Plane, linear_path, loss_plane
from tests.networks import Tied


class Point(nn.Module):
    """A model that is its parameters."""

    def __init__(self, *values: float, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(values, dtype=dtype))


def mlp(seed: int, norm: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))


def loss(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 40, dtype=next(model.parameters()).dtype).view(10, 4)
    return model(x).square().mean()


def squared(model: nn.Module) -> float:
    return float(model.get_parameter("theta").square().sum())


# ----------------------------------------------------------------------------------------------------------------- line


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-2, 2), st.integers(2, 60))
@settings(max_examples=50, deadline=None)
def test_a_quadratic_has_known_barrier_and_area(a, b, curvature, num_points):
    path = linear_path(Point(a), Point(b), lambda m: curvature * squared(m) + 5, num_points)
    bulge = -curvature * (b - a) ** 2  # the excess is bulge * w (1 - w)
    top = max(w * (1 - w) for w in path.weights)
    assert path.barrier == pytest.approx(max(bulge * top, 0), abs=1e-9)
    step = 1 / (num_points - 1)
    assert path.auc == pytest.approx(bulge * (1 - step**2) / 6, abs=1e-9)  # the trapezoidal rule, exactly


def test_area_and_barrier_converge_to_the_integral_and_the_supremum():
    path = linear_path(Point(0.0), Point(math.pi), lambda m: float(m.get_parameter("theta").sin()), 1001)
    assert path.barrier == pytest.approx(1, abs=1e-6)
    assert path.auc == pytest.approx(2 / math.pi, abs=1e-6)


def test_the_area_may_be_negative_and_the_barrier_not():
    path = linear_path(Point(-1.0), Point(1.0), squared)
    assert path.auc < 0
    assert path.barrier == 0


def test_it_starts_at_the_first_model():
    path = linear_path(Point(1.0), Point(3.0), lambda m: m.get_parameter("theta"), num_points=5)
    assert path.weights == [0, 0.25, 0.5, 0.75, 1]
    assert path.losses == [1, 1.5, 2, 2.5, 3]
    assert repr(path) == "LinearPath(5 points, barrier 0, AUC 0)"


def test_a_path_to_itself_is_flat():
    path = linear_path(mlp(0), mlp(0), loss)
    assert max(path.losses) - min(path.losses) < 1e-6
    assert path.barrier < 1e-6
    assert abs(path.auc) < 1e-6


def test_a_planted_permutation_has_a_barrier_until_it_is_undone():
    model = mlp(0).double()
    symmetry = ob.symmetry(model, torch.zeros(1, 4, dtype=torch.float64))
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    moved = permutation.apply(model)
    naive = linear_path(model, moved, loss)
    assert naive.losses[0] == pytest.approx(naive.losses[-1], rel=1e-12)
    assert max(map(abs, naive.excess)) > 1e-3
    undone = linear_path(model, permutation.inverse().apply(moved), loss)
    assert max(map(abs, undone.excess)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_keep_their_dtype(dtype):
    def check(model):
        assert {p.dtype for p in model.parameters()} == {dtype}
        return loss(model)

    with torch.backends.mkldnn.flags(
        enabled=False, allow_tf32=None
    ):  # its narrow kernels need instructions that not every machine has
        path = linear_path(mlp(0).to(dtype), mlp(1), check, num_points=3)
    assert all(map(math.isfinite, path.losses))


def test_tied_weights():
    path = linear_path(Tied(), Tied(), lambda m: m(torch.arange(6).view(2, 3)).square().mean(), num_points=3)
    assert all(map(math.isfinite, path.losses))


def test_nothing_of_the_users_is_touched():
    a, b = mlp(0, norm=True), mlp(1, norm=True).eval()
    a[2].eval()
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (a, b)]

    def rude(model):
        assert not model.training
        assert not torch.is_grad_enabled()
        value = loss(model)
        model.train()
        for p in model.parameters():
            p.fill_(9)
        return value

    linear_path(a, b, rude, num_points=3, data=[torch.randn(6, 4)])
    for model, state in zip((a, b), before, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert a.training
    assert not a[2].training
    assert not b.training
    assert linear_path(a, b, rude, num_points=2).losses[1] == pytest.approx(float(loss(b).detach()))


def test_batch_norm_is_estimated_anew_where_there_is_data():
    data = torch.randn(50, 4) * 3 + 1
    inputs: list[tuple[Tensor, Tensor]] = []

    def evaluate(model):
        hidden = model[0](data)
        inputs.append((hidden.mean(0) - model[1].running_mean, hidden.var(0) / model[1].running_var))
        return 0.0

    linear_path(mlp(0, norm=True), mlp(1, norm=True), evaluate, num_points=3, data=[(data, None)])
    for shift, ratio in inputs:
        torch.testing.assert_close(shift, torch.zeros(8), atol=1e-5, rtol=0)
        torch.testing.assert_close(ratio, torch.ones(8), atol=1e-5, rtol=0)


def test_any_metrics():
    values = iter([{"loss": 1, "accuracy": torch.tensor(0.5)}, {"accuracy": 0.25, "loss": torch.tensor([2.0])}])
    path = linear_path(Point(0.0), Point(1.0), lambda m: next(values), num_points=2)
    assert path.metrics == {"loss": [1, 2], "accuracy": [0.5, 0.25]}


def test_nan_is_kept():
    path = linear_path(Point(-1.0), Point(1.0), lambda m: m.get_parameter("theta").log(), num_points=3)
    assert math.isnan(path.losses[0])
    assert math.isnan(path.barrier)
    assert math.isnan(path.auc)
    inside = LinearPath([0, 0.5, 1], {"loss": [0.0, math.nan, 0.0]})
    assert math.isnan(inside.barrier)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        ({"error": 1}, ValueError, r"key 'loss'; its dict has \['error'\]"),
        ({"loss": torch.ones(3)}, TypeError, r"'loss' is a tensor of shape \(3,\)"),
        (None, TypeError, "'loss' is None"),
        ("0.3", TypeError, "'loss' is '0.3'"),
        ({"loss": 1.0, "classes": [1]}, TypeError, r"'classes' is \[1\]"),
    ],
)
def test_what_is_not_a_loss_is_refused(result, error, message):
    with pytest.raises(error, match=message):
        linear_path(Point(0.0), Point(1.0), lambda m: result)


def test_refusals():
    with pytest.raises(ValueError, match="num_points must be at least 2"):
        linear_path(Point(0.0), Point(1.0), squared, num_points=1)
    with pytest.raises(ValueError, match=r"'theta' has shape \(1,\)"):
        linear_path(Point(0.0), Point(1.0, 2.0), squared)
    with pytest.raises(TypeError, match="Module"):
        linear_path({"theta": torch.ones(1)}, Point(1.0), squared)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="read once"):
        linear_path(mlp(0), mlp(1), loss, data=iter([torch.ones(2, 4)]))
    names = iter(["accuracy", "error"])
    with pytest.raises(ValueError, match=r"\['loss', 'accuracy'\] at one point, \['loss', 'error'\]"):
        linear_path(Point(0.0), Point(1.0), lambda m: {"loss": 0, next(names): 1})


def test_progress_goes_to_stderr(capsys):
    linear_path(Point(0.0), Point(1.0), squared, num_points=3)
    assert capsys.readouterr() == ("", "")
    linear_path(Point(0.0), Point(1.0), squared, num_points=3, progress=True)
    assert capsys.readouterr().err.endswith("points: 3 of 3\n")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_second_model_may_be_on_another_device():
    def evaluate(model):
        assert model[0].weight.is_cuda
        return model(torch.ones(3, 4, device="cuda")).square().mean()

    path = linear_path(mlp(0, norm=True).cuda(), mlp(1, norm=True), evaluate, num_points=3, data=[torch.randn(9, 4)])
    assert all(map(math.isfinite, path.losses))
    plane = loss_plane(mlp(0).cuda(), mlp(1), mlp(2).cuda(), evaluate, resolution=2)
    assert all(math.isfinite(v) for row in plane.losses for v in row)


# ---------------------------------------------------------------------------------------------------------------- plane


@pytest.mark.parametrize("which", [0, 1, 2])
def test_distances_on_the_plane_are_distances_of_parameters(which):
    torch.manual_seed(0)
    models = [Point(*torch.randn(7).tolist()) for _ in range(3)]
    target = models[which].theta.detach()
    plane = loss_plane(*models, lambda m: (m.get_parameter("theta") - target).norm(), resolution=5, margin=0.3)
    x, y = plane.points[which]
    for row, top in zip(plane.losses, plane.y, strict=True):
        for value, right in zip(row, plane.x, strict=True):
            assert value == pytest.approx(math.hypot(right - x, top - y), abs=1e-9)


def test_the_grid_reaches_beyond_the_models():
    plane = loss_plane(Point(0, 0), Point(4, 0), Point(-1, -2), squared, resolution=4, margin=0.5)
    for found, expected in zip(plane.points, [(0, 0), (4, 0), (-1, 2)], strict=True):
        assert found == pytest.approx(expected)
    assert plane.x == pytest.approx([-3.5, -3.5 + 10 / 3, -3.5 + 20 / 3, 6.5])
    assert plane.y[0] == pytest.approx(-1)
    assert plane.y[-1] == pytest.approx(3)
    assert len(plane.losses) == len(plane.losses[0]) == 4


def test_without_margin_the_lower_corners_are_the_first_two_models():
    a, b = Point(1, 1), Point(5, 1)
    plane = loss_plane(a, b, Point(2, 4), lambda m: {"loss": squared(m), "one": 1}, resolution=2, margin=0)
    assert plane.losses[0] == pytest.approx([2, 26])
    assert plane.metrics["one"] == [[1, 1], [1, 1]]


def test_batch_norm_on_a_plane():
    plane = loss_plane(*(mlp(i, norm=True) for i in range(3)), loss, resolution=3, data=[torch.randn(20, 4)])
    assert all(math.isfinite(v) for row in plane.losses for v in row)


def test_buffers_and_ties_do_not_count_in_distances():
    models = [Tied() for _ in range(3)]
    plane = loss_plane(*models, lambda m: 0.0, resolution=2)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    expected = sum(float((p - q).detach().square().sum()) for p, q in pairs)
    assert plane.points[1][0] == pytest.approx(expected**0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_models_on_one_line_are_refused(dtype):
    a, b = mlp(0).to(dtype), mlp(1).to(dtype)
    between = mlp(0).to(dtype)
    between.load_state_dict({k: 0.3 * v.double() + 0.7 * b.state_dict()[k].double() for k, v in a.state_dict().items()})
    with pytest.raises(ValueError, match="lie on one line"):
        loss_plane(a, b, between, loss)
    with pytest.raises(ValueError, match="first two models are equal"):
        loss_plane(a, a, b, loss)
    with pytest.raises(ValueError, match="lie on one line"):
        loss_plane(a, b, a, loss)


def test_refusals_of_planes():
    with pytest.raises(ValueError, match="resolution"):
        loss_plane(Point(0, 0), Point(4, 0), Point(-1, -2), squared, resolution=1)
    with pytest.raises(ValueError, match="margin"):
        loss_plane(Point(0, 0), Point(4, 0), Point(-1, -2), squared, margin=-1)


def test_a_plane_shows_itself_in_short():
    plane = Plane(
        [0.0, 1.0], [0.0, 1.0, 2.0], ((0.0, 0.0), (1.0, 0.0), (0.5, 1.0)), {"loss": [[1, 2], [3, math.nan], [5, 4]]}
    )
    assert repr(plane) == "Plane(2 x 3 points, loss from 1 to 5)"
    assert "(0.5, 1)" in plane._repr_html_()
    assert "nan" in repr(Plane([0.0], [0.0], plane.points, {"loss": [[math.nan]]}))


def test_a_form_of_repair_that_is_none_is_refused_before_a_symmetry_is_asked_for():
    with pytest.raises(ValueError, match=r"repair must be one of 'repair', .*, got 'bogus'"):
        linear_path(mlp(0), mlp(1), loss, repair="bogus")  # type: ignore[arg-type]
