"""Matrices of each kind, and tensors multiplied by them along the right axes."""

import pytest
import torch

import onebasin as ob
from onebasin.symmetries import Basis, Place
from onebasin.symmetries.basis_matrices import (
    MixedTensors,
    check_matrices,
    complement_of_ones,
    pair,
    random_matrices,
    random_reflection,
)
from onebasin.symmetries.layout import parse

GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("kind", ["linear", "orthogonal", "centred"])
@pytest.mark.parametrize("shape", [(5, 5), (3, 4, 4), (1, 1)])
def test_random_matrices_are_of_their_kind(kind, shape):
    matrices = random_matrices(shape, kind, GENERATOR)
    check_matrices(Basis("w", "h", kind, {}), matrices)
    assert matrices.shape == shape
    assert float(torch.linalg.cond(matrices).max()) < 20
    if kind != "linear":
        torch.testing.assert_close(matrices @ matrices.mT, torch.eye(shape[-1], dtype=torch.float64).expand(shape))
    if kind == "centred":
        torch.testing.assert_close(matrices.sum(-1), torch.ones(shape[:-1], dtype=torch.float64))


@pytest.mark.parametrize(
    ("kind", "matrix", "message"),
    [
        ("orthogonal", 2 * torch.eye(3), "not orthogonal"),
        ("centred", torch.diag(torch.tensor([1.0, 1.0, -1.0])), "vector of ones"),
        ("linear", torch.diag(torch.tensor([1.0, 1.0, 0.0])), "singular"),
        ("linear", torch.full((3, 3), float("nan")), "not finite"),
        ("signed", torch.tensor([1.0, -1.0, 0.5]), "not 1 and -1"),
        ("rotary", torch.diag(torch.tensor([1.0, 2.0])), "not a rotation"),
        ("rotary", torch.zeros(2, 2), "not a rotation"),
    ],
)
def test_other_matrices_are_refused(kind, matrix, message):
    with pytest.raises(ValueError, match=message):
        check_matrices(Basis("w", "h", kind, {}), matrix.double())


def test_the_complement_of_ones_is_orthonormal():
    basis = complement_of_ones(6)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(basis.sum(0), torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)


def test_writers_take_the_matrix_and_readers_its_dual():
    sizes = {"h": 2, "d": 3, "i": 4}
    layouts = {"q": parse("(h d) i", sizes), "k": parse("(h d) i", sizes)}
    places = {"q": (Place(0, 0, False),), "k": (Place(0, 0, True),)}
    mixed = MixedTensors({"b": Basis("b", "d", "linear", places, ("h",))}, layouts)
    matrices = random_matrices((2, 3, 3), "linear", GENERATOR)
    dual = torch.linalg.inv(matrices).mT
    q, k = (torch.randn(6, 4, dtype=torch.float64, generator=GENERATOR) for _ in range(2))
    found = mixed.mix_with({"q": q, "k": k, "other": q}, pair("b", matrices, dual))
    assert found.keys() == {"q", "k"}
    torch.testing.assert_close(found["q"], torch.cat([matrices[h] @ q[3 * h : 3 * h + 3] for h in range(2)]))
    torch.testing.assert_close(found["k"], torch.cat([dual[h] @ k[3 * h : 3 * h + 3] for h in range(2)]))
    scores, after = (a.view(2, 3, 4).mT @ b.view(2, 3, 4) for a, b in ((q, k), (found["q"], found["k"])))
    torch.testing.assert_close(after, scores)


def test_two_bases_of_one_group_stand_side_by_side_in_an_axis():
    """Two segments of one axis that are permuted together may be mixed by different matrices."""
    layouts = {"w": parse("a+a", {"a": 3})}
    bases = {name: Basis(name, "a", "linear", {"w": (Place(0, n, False),)}) for n, name in enumerate(("one", "two"))}
    mixed = MixedTensors(bases, layouts)
    one, two = (random_matrices((3, 3), "linear", GENERATOR) for _ in range(2))
    w = torch.randn(6, dtype=torch.float64, generator=GENERATOR)
    (found,) = mixed.mix_with({"w": w}, pair("one", one, one) | pair("two", two, two)).values()
    torch.testing.assert_close(found, torch.cat([one @ w[:3], two @ w[3:]]))


def test_transforms_of_a_family_compose_and_invert():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double().eval()

    class Itself(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, x, x, need_weights=False)[0]

    model, x = Itself().eval(), torch.randn(2, 3, 8, dtype=torch.float64)
    symmetry = ob.symmetry(model, x, kinds="all")
    assert sorted(basis.kind for basis in symmetry.bases.values()) == ["linear", "linear"]
    a, b = (ob.Transform.random(symmetry, torch.Generator().manual_seed(n)) for n in (1, 2))
    together, apart = (a @ b).apply(model), a.apply(b.apply(model))
    back = a.inverse().apply(a.apply(model))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(together[key], apart[key])
        torch.testing.assert_close(back[key], value)


@pytest.mark.parametrize("kind", ["orthogonal", "centred"])
def test_reflections_are_matrices_of_their_kind_in_every_place(kind):
    sizes = {"h": 5, "i": 4}
    layouts = {key: parse(pattern, sizes) for key, pattern in {"w": "h i", "r": "i h", "s": "h h", "p": "(2 h) i"}.items()}
    places = {"w": (Place(0, 0, False),), "r": (Place(1, 0, True),), "s": (Place(0, 0, False), Place(1, 0, True))}
    basis = Basis("b", "h", kind, {**places, "p": (Place(0, 0, False),)})
    vector = random_reflection(5, kind, GENERATOR)
    matrix = torch.eye(5, dtype=torch.float64) - 2 * torch.outer(vector, vector)
    check_matrices(basis, matrix)
    mixed = MixedTensors({"b": basis}, layouts)
    for key, layout in layouts.items():
        tensor = torch.randn([term.size for term in layout], dtype=torch.float64, generator=GENERATOR)
        expected = mixed.mix({key: tensor}, {"b": matrix})[key]
        assert not torch.allclose(expected, tensor)
        torch.testing.assert_close(mixed.reflect(key, tensor, {"b": vector}), expected)
        assert mixed.reflect(key, tensor, {}) is tensor
