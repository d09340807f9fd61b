"""What a model's code keeps outside of its modules is as it was after a trace, whatever front end ran."""

import functools
import itertools
import random
from collections import deque

import numpy
import pytest
import torch

import onebasin as ob
from onebasin.programs.exporting import export
from onebasin.programs.recording import record
from onebasin.programs.stores import find_stores
from tests.cases import call_of, two_layers, weight

CACHE = {}
LAST = None


class Holder:
    """No module."""

    def __init__(self):
        self.cached, self.inner = None, None

    def get(self, make):
        if self.cached is None:
            self.cached = make()
        return self.cached


HOLDER = Holder()


@functools.lru_cache
def double(scale):
    return scale * 2


def keep_in_an_object(self, x):
    return self.last(self.first(x) * self.holder.get(lambda: self.scale * 2))


def keep_in_an_object_of_an_object(self, x):
    return self.last(self.first(x) * self.holder.inner.get(lambda: self.scale * 2))


def keep_in_a_global_dict(self, x):
    if "scale" not in CACHE:
        CACHE["scale"] = self.scale * 2
    return self.last(self.first(x) * CACHE["scale"])


def keep_in_a_global_object(self, x):
    return self.last(self.first(x) * HOLDER.get(lambda: self.scale * 2))


def assign_a_global_variable(self, x):
    global LAST
    LAST = self.scale * 2 if LAST is None else LAST
    return self.last(self.first(x) * LAST)


def keep_in_a_cache(self, x):
    return self.last(self.first(x) * double(self.scale))


def keep_in_a_default(self, x, kept=[]):  # noqa: B006
    kept.append(self.first(x) * self.scale)
    return self.last(kept[0])


KEEPING = [
    keep_in_an_object,
    keep_in_an_object_of_an_object,
    keep_in_a_global_dict,
    keep_in_a_global_object,
    assign_a_global_variable,
    keep_in_a_cache,
    keep_in_a_default,
]


@pytest.mark.parametrize("forward", KEEPING, ids=lambda f: f.__name__)
@pytest.mark.parametrize("read", [record, export, lambda model, call: ob.symmetry(model, call.args)])
def test_the_next_forward_is_as_if_nothing_had_run(forward, read):
    model, inputs = two_layers(forward, scale=weight(8)), torch.rand(3, 4)
    model.holder = Holder()
    model.holder.inner = Holder()
    read(model, call_of(inputs))
    result = model(inputs)
    assert type(result) is torch.Tensor
    result.sum().backward()
    assert model.scale.grad is not None
    CACHE.clear()
    HOLDER.cached = None
    double.cache_clear()
    globals()["LAST"] = None
    keep_in_a_default.__defaults__[0].clear()


def test_lists_of_hooks_are_left_alone():
    seen, last = [], None
    model = two_layers(lambda self, x: self.last(self.first(x)))

    def hook(module, args, result):
        nonlocal last
        last = result
        seen.append(result)

    model.first.register_forward_hook(hook)
    model.last.register_forward_pre_hook(functools.partial(lambda kept, *args: kept.append(args), seen))
    ob.symmetry(model, torch.rand(3, 4))
    assert not seen
    assert last is None


def test_generators_of_python_and_numpy_are_left_alone():
    def forward(self, x):
        return self.last(self.first(x) * random.random() * numpy.random.rand())

    random.seed(1)
    numpy.random.seed(1)
    expected = random.random(), numpy.random.rand()
    random.seed(1)
    numpy.random.seed(1)
    ob.symmetry(two_layers(forward), torch.rand(3, 4), verify=False)
    assert (random.random(), numpy.random.rand()) == expected


def test_objects_are_followed_to_some_depth():
    """A module may hold the trainer that runs it, and the trainer everything else."""
    model = two_layers(lambda self, x: x)
    chain = [Holder() for _ in range(8)]
    for one, other in itertools.pairwise(chain):
        one.inner = other
    model.holder = chain[0]
    found = {id(container) for container in find_stores(model).containers}
    assert [id(vars(holder)) in found for holder in chain] == [True] * 4 + [False] * 4
    model.holder.inner = deque([model.holder, {1}])  # in a circle
    assert {1} in find_stores(model).containers
