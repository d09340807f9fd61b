"""A captured step computes what an eager one does. Without CUDA a stand-in for a graph calls the step itself."""

import contextlib
import gc
import itertools
import warnings
import weakref

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.descent import cuda_graphs
from onebasin.descent.cuda_graphs import NUM_WARMUP, CapturedStep, run_steps
from onebasin.matching.methods.sinkhorn import make_optimizer, make_step
from onebasin.matching.problem import Problem
from onebasin.tensors.states import read_state

CPU = torch.device("cpu")


class Descent:
    """Gradient descent on a vector that is to meet the means of batches, and a list of the calls made by Python."""

    def __init__(self):
        self.place = torch.zeros(3)
        self.calls: list[torch.Size] = []

    def run(self, batch):
        self.calls.append(batch["x"].shape)
        error = batch["x"].mean(0) - self.place
        self.place += batch["rate"] * error
        return error.square().sum()


def batches(sizes):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(size, 3, generator=generator), "rate": 0.5} for size in sizes]


def play(run, batch):
    """A stand-in for a CUDA graph: it reads its batch, and writes its cost, where they were at the capture."""
    cost = torch.empty(())
    return lambda: cost.copy_(run(batch)), cost


def follow(step, descent, data):
    return [(float(step(batch)), descent.place.clone()) for batch in data]


@pytest.mark.parametrize("sizes", [[4] * 12, [4, 4, 2] * 4, [2, 4, 4, 4, 4, 2, 4, 2]], ids=["equal", "two shapes", "late"])
def test_the_same_costs_and_the_same_path(sizes):
    plain, captured = Descent(), Descent()
    step = CapturedStep(captured.run, True, CPU, capture_graph=play)
    expected = follow(plain.run, plain, batches(sizes))
    for (cost, place), (other_cost, other_place) in zip(follow(step, captured, batches(sizes)), expected, strict=True):
        assert cost == other_cost
        assert torch.equal(place, other_place)
    assert step.is_captured


def test_a_batch_given_is_left_as_it_is():
    descent, data = Descent(), batches([4] * 9)
    before = [batch["x"].clone() for batch in data]
    step = CapturedStep(descent.run, True, CPU, capture_graph=play)
    for batch in data:
        step(batch)
    assert all(torch.equal(batch["x"], x) for batch, x in zip(data, before, strict=True))


def test_what_is_no_tensor_belongs_to_the_graph():
    """A number in a batch is baked into a graph: a batch with another one must not be replayed."""
    plain, captured = Descent(), Descent()
    data = batches([4] * 12)
    for batch, rate in zip(data, itertools.cycle([0.5, 0.25]), strict=False):
        batch["rate"] = rate
    expected = follow(plain.run, plain, data)
    assert str(follow(CapturedStep(captured.run, True, CPU, capture_graph=play), captured, data)) == str(expected)


@pytest.fixture
def watching(monkeypatch):
    """Not empty while waiting for the device is an error."""
    watching = []

    class ForbidSync:
        def __init__(self, device):
            pass

        def __enter__(self):
            watching.append(True)

        def __exit__(self, *_):
            watching.pop()

    monkeypatch.setattr(cuda_graphs, "_forbid_sync", ForbidSync)
    return watching


def test_a_step_that_waits_is_run_eagerly_with_a_warning(watching):
    plain, watched = Descent(), Descent()

    def run(batch):
        if watching:
            raise RuntimeError("called a synchronizing CUDA operation")
        return watched.run(batch)

    step = CapturedStep(run, True, CPU, capture_graph=play)
    with pytest.warns(UserWarning, match="synchronizing CUDA operation") as caught:
        found = follow(step, watched, batches([4] * 9))
    assert len(caught) == 1
    assert not step.is_captured
    assert str(found) == str(follow(plain.run, plain, batches([4] * 9)))


def test_nothing_of_a_step_that_failed_is_alive_when_it_is_run_again(watching):
    """Its graph belongs to another stream: PyTorch warns of nodes that are used in two."""
    costs = []

    def run(batch):
        place = torch.zeros(3, requires_grad=True)
        cost = (batch["x"] - place).square().sum()
        if watching:
            costs.append(weakref.ref(cost))
            raise RuntimeError("called a synchronizing CUDA operation")
        assert all(failed() is None for failed in costs)
        return cost.detach()

    step = CapturedStep(run, True, CPU, capture_graph=play)
    with pytest.warns(UserWarning, match="synchronizing CUDA operation"):
        found = [step(batch) for batch in batches([4] * 9)]
    assert len(found) == 9
    assert len(costs) == 1


def test_a_capture_that_fails_is_a_warning():
    plain, descent = Descent(), Descent()

    def refuse(run, batch):
        raise RuntimeError("operation not permitted when stream is capturing")

    step = CapturedStep(descent.run, True, CPU, capture_graph=refuse)
    with pytest.warns(UserWarning, match="not permitted when stream is capturing"):
        found = follow(step, descent, batches([4] * 9))
    assert str(found) == str(follow(plain.run, plain, batches([4] * 9)))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_during_a_capture(fails):
    """What the collector frees on the device, such as an earlier graph, would invalidate it."""
    was_enabled = []

    def capture(run, batch):
        was_enabled.append(gc.isenabled())
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return play(run, batch)

    step = CapturedStep(Descent().run, True, CPU, fallback=False, capture_graph=capture)
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        for batch in batches([4] * 9):
            step(batch)
    assert was_enabled == [False]
    assert gc.isenabled()


def test_a_step_is_freed_without_the_collector():
    step = CapturedStep(Descent().run, True, CPU)
    alive = weakref.ref(step)
    gc.disable()
    try:
        del step
        assert alive() is None
    finally:
        gc.enable()


def test_nothing_is_captured_unless_asked_for():
    descent = Descent()
    step = CapturedStep(descent.run, False, CPU, capture_graph=play)
    follow(step, descent, batches([4] * 9))
    assert not step.is_captured
    assert len(descent.calls) == 9


def test_without_a_fallback_a_capture_that_fails_raises(watching):
    descent = Descent()

    def refuse(run, batch):
        raise RuntimeError("operation not permitted when stream is capturing")

    def run(batch):
        assert not watching  # some steps wait for the device only where they are not captured
        return descent.run(batch)

    step = CapturedStep(run, True, CPU, fallback=False, capture_graph=refuse)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        follow(step, descent, batches([4] * 9))
    assert len(descent.calls) == NUM_WARMUP


class Counter:
    """Counts the steps that were run, and those that a graph ran."""

    def __init__(self):
        self.num_steps = self.num_replayed = 0

    def step(self):
        self.num_steps += 1

    def capture(self, run, batch):
        def replay():
            before = self.num_steps
            run(batch)
            self.num_replayed += self.num_steps - before

        return replay, None


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("num_steps", [1, 99, 100, 101, 250])
def test_every_step_is_run_and_reported(num_steps, capture):
    counter = Counter()
    reports = list(run_steps(counter.step, num_steps, CPU, capture, counter.capture))
    assert counter.num_steps == num_steps
    assert counter.num_replayed == (max(0, num_steps - NUM_WARMUP) // 4 * 4 if capture else 0)
    expected = [*range(100, num_steps + 1, 100), *([num_steps] if num_steps % 100 else [])]
    assert len(reports) == len(set(reports)) == len(expected)
    assert all(0 <= report - number < 4 for report, number in zip(reports, expected, strict=True))
    assert capture or reports == expected


def small_pair():
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)) for n in (16, 16, 8)]
    return a, b, data


def test_capture_needs_cuda_and_a_fixed_tau():
    a, b, data = small_pair()
    with pytest.raises(ValueError, match="capture=True needs models on CUDA"):
        ob.align(b, to=a, example_inputs=data[0][0], capture=True)


def test_random_points_are_drawn_without_reading_a_value():
    """On the meta device there is no value to read."""
    a, _, data = small_pair()
    objective = ob.RandomPoint(nn.functional.cross_entropy).bind(a)
    meta = {key: value.to("meta") for key, value in a.state_dict().items()}
    cost = objective(meta, meta, tuple(value.to("meta") for value in data[0]))
    assert cost.shape == ()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", ["l2", "mid"])
def test_a_captured_descent_is_the_plain_one(kind):
    a, b, data = small_pair()
    a, b = a.cuda(), b.cuda()
    options = {"detect_copy": False, "polish": False, "steps": 30, "patience": 100}
    if kind == "mid":
        options |= {"objective": ob.Midpoint(nn.functional.cross_entropy), "data": data}
    found = [ob.align(b, to=a, example_inputs=data[0][0].cuda(), capture=capture, **options) for capture in (False, True)]
    assert found[0].permutation == found[1].permutation
    for one, other in zip(found[0].history, found[1].history, strict=True):
        assert one["soft"] == pytest.approx(other["soft"], rel=1e-4)
    for key, value in found[0].logits.items():
        torch.testing.assert_close(value, found[1].logits[key], rtol=1e-3, atol=1e-3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_captured_random_point_is_drawn_anew():
    a, b, data = small_pair()
    a, b = a.cuda(), b.cuda()
    seen = []
    symmetry = ob.symmetry(a, data[0][0].cuda())
    batch = tuple(value.cuda() for value in data[0])
    with torch.no_grad():
        for p in b.parameters():
            p.mul_(10)  # so that the loss depends on the point
    states = [read_state(m) for m in (b, a)]
    objective = ob.RandomPoint(nn.functional.cross_entropy).bind(a)
    problem = Problem(symmetry, states[0], states[1], tuple(states[0].shapes), objective, model=a)
    net = ob.RebasinNet(b, symmetry)
    step = CapturedStep(make_step(problem, net, make_optimizer(net, "adam", 1e-9)), True, torch.device("cuda"))
    for _ in range(NUM_WARMUP + 20):
        seen.append(round(float(step(batch)), 4))
    assert step.is_captured
    assert len(set(seen[NUM_WARMUP + 2 :])) > 10


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_loss_that_reads_values_is_run_eagerly():
    a, b, data = small_pair()
    a, b = a.cuda(), b.cuda()

    def loss(output, expected):
        value = nn.functional.cross_entropy(output, expected)
        return value * (2.0 if value.item() > 0.5 else 1.0)

    options = {"example_inputs": data[0][0].cuda(), "objective": ob.Midpoint(loss), "data": data, "steps": 12}
    with pytest.warns(UserWarning, match="cannot be captured"):
        captured = ob.align(b, to=a, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = ob.align(b, to=a, capture=False, **options)
    assert captured.permutation == plain.permutation
