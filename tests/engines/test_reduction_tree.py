import functools

import pytest

from onebasin.engines.reduction_tree import FAN_IN, Tree


def combine_as_a_tree(items):
    """The same shape, by levels."""
    while len(items) > 1:
        groups = [items[start : start + FAN_IN] for start in range(0, len(items), FAN_IN)]
        items = [functools.reduce(lambda a, b: (a, b), group) for group in groups]
    return items[0]


@pytest.mark.parametrize("count", [1, 2, 8, 9, 63, 64, 65, 448, 455, 456, 511, 512, 513, 600])
def test_the_shape_of_the_tree_depends_on_the_number_alone(count):
    tree = Tree(lambda a, b: (a, b))
    for number in range(count):
        tree.add(number)
    assert tree.finish() == combine_as_a_tree(list(range(count)))
