"""A module is run without a trace in it or in the process, and other threads notice nothing."""

import io
import logging
import random
import threading
import warnings

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.programs.isolation import MutedStream, UnfusedAttention, evaluation_mode, isolated, quiet
from onebasin.torch_internals import TorchDispatchMode
from tests.cases import call_of, two_layers
from tests.networks import CASES


def in_another_thread(function):
    """What a function returns there, or raises."""
    found = []

    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_modes_and_seeds_are_restored():
    model = two_layers(lambda self, x: x).train()
    model.first.eval()
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    with isolated(model, call_of(torch.rand(3, 4))):
        assert not model.training
        torch.manual_seed(5)
    assert model.training
    assert not model.first.training
    torch.manual_seed(1)
    with isolated(model, call_of(torch.ones(3, 4))):
        pass
    assert torch.equal(torch.rand(1), expected)


def test_numbers_that_others_draw_meanwhile_are_not_drawn_again():
    with isolated(two_layers(lambda self, x: x), call_of(torch.ones(3, 4))):
        drawn = in_another_thread(lambda: torch.rand(4))
    assert not torch.equal(torch.rand(4), drawn)


def test_warnings_and_logs_of_one_thread_are_dropped(caplog):
    before = list(warnings.filters)
    logger = logging.getLogger("torch.export._trace")
    with quiet():
        warnings.warn("mine", stacklevel=1)
        logger.error("mine")
        assert isinstance(in_another_thread(lambda: warnings.warn("of another", stacklevel=1)), UserWarning)
        in_another_thread(lambda: logger.error("of another"))
    assert [record.message for record in caplog.records] == ["of another"]
    assert warnings.filters == before
    with pytest.warns(UserWarning, match="mine"):
        warnings.warn("mine", stacklevel=1)


def test_overlapping_uses_leave_no_filter_behind():
    first, second = quiet(), quiet()
    before = list(warnings.filters)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert warnings.filters == before


def test_a_stream_is_muted_for_one_thread():
    behind = io.StringIO()
    stream = MutedStream(behind)
    print("mine", file=stream, flush=True)
    in_another_thread(lambda: print("of another", file=stream))
    assert behind.getvalue() == "of another\n"


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_fused_path_of_attention_is_off_in_one_thread():
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()

    def is_fused():
        with torch.no_grad(), Operations() as seen:
            layer(torch.rand(2, 3, 8))
        return "_transformer_encoder_layer_fwd" in seen.names

    assert is_fused()
    with UnfusedAttention():
        assert not is_fused()
        assert in_another_thread(is_fused)
    layer.train()
    with evaluation_mode(layer):
        assert not layer.training
        assert not is_fused()
    assert layer.training


NAMES = ("mlp tanh", "densenet", "attention by hand", "writes into views", "split, stack and slice", "u-net", "two heads")


def test_several_threads_trace_while_another_runs_a_model():
    """The results are those of a single thread. One model is traced by all of them, one is exported."""

    def find(name, model):
        symmetry = ob.symmetry(model, CASES[name].inputs())
        return symmetry.groups, symmetry.layouts, symmetry.num_free, [f.name for f in symmetry.front_ends]

    expected = {name: find(name, CASES[name].make()) for name in NAMES}
    shared = CASES["densenet"].make().train()
    running = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.TransformerEncoderLayer(8, 2))
    filters, failures, is_done = list(warnings.filters), [], threading.Event()

    def trace(seed):
        numbers = random.Random(seed)
        for name in numbers.choices(NAMES, k=5):
            model = shared if name == "densenet" else CASES[name].make()
            if find(name, model) != expected[name]:
                failures.append(name)

    def run():
        while not is_done.is_set():
            running(torch.rand(3, 4)).sum().backward()

    def report(function, *args):
        try:
            function(*args)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=report, args=(trace, seed)) for seed in range(3)]
    runner = threading.Thread(target=report, args=(run,))
    for thread in (runner, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    is_done.set()
    runner.join()
    assert not failures
    assert shared.training
    assert warnings.filters == filters
    assert not nn.modules.module._global_forward_hooks
