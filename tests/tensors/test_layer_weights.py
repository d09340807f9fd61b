import pytest

from onebasin.tensors.layer_weights import find_layer_weights

KEYS = ["embed.weight", "layers.0.weight", "layers.10.weight", "head.weight"]


def test_the_first_pattern_that_fits_counts():
    found = find_layer_weights(KEYS, {"layers.0.*": [1, 0], "layers.*": [1, 3]}, 2)
    assert found == {"layers.0.weight": [1, 0], "layers.10.weight": [0.25, 0.75]}


def test_one_tensor_has_one_set_of_weights():
    ties = [("embed.weight", "head.weight")]
    with pytest.raises(ValueError, match="are one tensor: give them the same layer weights"):
        find_layer_weights(KEYS, {"head.*": [1, 0]}, 2, ties)
    assert len(find_layer_weights(KEYS, {"head.*": [1, 0], "embed.*": [2, 0]}, 2, ties)) == 2


@pytest.mark.parametrize(("weights", "message"), [([1], "2 models and 1 weights"), ([1, -1], "sum other than zero")])
def test_weights_that_do_not_fit_name_the_pattern(weights, message):
    with pytest.raises(ValueError, match=rf"layer weights of 'head\.\*': .*{message}"):
        find_layer_weights(KEYS, {"head.*": weights}, 2)


def test_a_pattern_without_a_tensor_is_refused():
    with pytest.raises(ValueError, match="no tensor has such a name"):
        find_layer_weights(KEYS, {"layer.*": [1, 0]}, 2)
