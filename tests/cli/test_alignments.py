from types import SimpleNamespace

import torch

import onebasin as ob
from onebasin.cli.alignments import Alignments
from tests.cli.cli_networks import make_with_inputs


def result(notes, noted_models=None):
    return SimpleNamespace(notes=notes, noted_models=noted_models or {}, method="ste", history=[])


def test_each_note_is_there_once_with_the_models_that_it_is_about():
    found = Alignments(["a", "b", "c"])
    found.add(1, result(["slow", "folded"], {"folded": [0, 1]}))
    found.add(2, result(["slow", "odd"]))
    found.remarks.append("done")
    assert found.notes == ["b, c: slow", "a, b: folded", "c: odd", "done"]
    assert found.methods == "ste"


def test_permutations_are_taken_from_the_first_model_on():
    symmetry = ob.symmetry(*make_with_inputs())
    found = Alignments(["a", "b"])
    found.keep([symmetry.random(torch.Generator().manual_seed(seed)) for seed in range(2)])
    first, second = found.elements_from_first
    assert first.is_identity
    assert second == found.permutations[0].inverse() @ found.permutations[1]
    assert found.moved.keys() == {"a", "b"}


def test_a_line_goes_from_the_first_model_to_each_other():
    lines = Alignments(["a", "b", "c"]).name_lines([1, 2, 3], ", aligned")  # pyright: ignore[reportArgumentType]
    assert lines == {"a to b, aligned": 2, "a to c, aligned": 3}
