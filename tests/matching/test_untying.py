"""What is tied is untied where that frees a gain, and nowhere else."""

from types import SimpleNamespace

import torch
from torch import nn

import onebasin as ob
from onebasin.matching.skeletons import Skeleton
from onebasin.matching.untying import list_untied, split_tied, untie
from onebasin.tensors.states import find_ties, read_state
from tests.basis_networks import Tied, with_gains


def make(seed: int = 0) -> tuple[Tied, torch.Tensor]:
    torch.manual_seed(seed)
    return with_gains(Tied()).double().eval(), torch.randint(0, 11, (2, 4))


def test_tied_keys_become_parameters_of_their_own():
    model, x = make()
    model.config = SimpleNamespace(tie_word_embeddings=True)
    made = split_tied(Skeleton(model, x), ["head.weight"]).module
    assert find_ties(made) == ()
    assert find_ties(model) == (("embed.weight", "head.weight"),)
    assert torch.equal(made.head.weight, made.embed.weight)
    assert torch.equal(made(x), model(x))
    assert (made.config.tie_word_embeddings, model.config.tie_word_embeddings) == (False, True)


def test_a_tie_in_the_way_of_a_gain_is_found():
    model, x = make()
    found = untie(Skeleton(model, x), ob.symmetry(model, x, kinds="all"), read_state(model))
    assert found.keys == ("head.weight",)
    assert "give --untie (untie=True in Python), which needs tie_word_embeddings: false" in found.reasons["norm.weight"]
    assert find_ties(found.skeleton.module) == ()


def test_nothing_is_untied_where_no_gain_is_freed():
    model, x = make()
    nn.init.ones_(model.norm.weight)
    skeleton = Skeleton(model, x)
    found = untie(skeleton, ob.symmetry(model, x, kinds="all"), read_state(model))
    assert (found.skeleton is skeleton, found.keys, found.reasons) == (True, (), {})


class ScaledIfTied(Tied):
    """Its code asks whether the head is tied, as that of some models does."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)

    def forward(self, x):
        return super().forward(x) * (0.5 if self.config.tie_word_embeddings else 1.0)


def test_a_model_that_computes_something_else_untied_is_left():
    torch.manual_seed(0)
    model, x = with_gains(ScaledIfTied()).double().eval(), torch.randint(0, 11, (2, 4))
    form = ob.canonical(model, x, untie=True)
    assert (form.folded, form.untied) == ((), ())
    assert "computes something else if they are untied" in form.left["norm.weight"]
    assert form.model.head.weight is form.model.embed.weight


def test_keys_that_are_no_longer_tied():
    before = (("a", "b", "c"), ("d", "e"))
    assert list_untied(before, before) == ()
    assert list_untied(before, (("a", "c"),)) == ("b", "e")
    assert list_untied(before, (("b", "c"), ("d", "e"))) == ("b", "c")
    assert list_untied(before, ()) == ("b", "c", "e")
