"""Texts that language models write."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import onebasin as ob


class Chain(nn.Module):
    """The next token is almost surely the last one plus a step."""

    def __init__(self, step: int = 1, vocabulary: int = 11):
        super().__init__()
        self.table = nn.Parameter(20 * torch.eye(vocabulary).roll(step, 1))

    def forward(self, tokens):
        return self.table[tokens]


class Wrapped(Chain):
    def forward(self, tokens):
        return SimpleNamespace(logits=super().forward(tokens))


def test_each_model_writes_its_share():
    batches = ob.synthetic_text([Chain(1), Wrapped(2)], length=6, num_batches=3, batch_size=8)
    assert len(batches) == 3
    for tokens, following in batches:
        assert tokens.shape == following.shape == (8, 6)
        assert torch.equal(tokens[:, 1:], following[:, :-1])
        steps = (following - tokens) % 11
        assert bool((steps == steps[:, :1]).all())
        assert sorted(steps[:, 0].tolist()) == [1] * 4 + [2] * 4


class Attention(nn.Module):
    """One layer of attention; each token sees those before it, or all. It notes the lengths of the texts it is given."""

    lengths: ClassVar[list[int]] = []

    def __init__(self, is_causal: bool):
        super().__init__()
        self.table, self.head, self.is_causal = nn.Embedding(9, 6), nn.Linear(6, 9), is_causal

    def forward(self, tokens):
        self.lengths.append(tokens.shape[1])
        x = 3 * self.table(tokens)
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.is_causal))


def write_growing(model, length, batch_size):
    """One batch as `synthetic_text` draws it, by texts that grow token by token."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (batch_size, 1))
    for _ in range(length):
        tokens = torch.cat([tokens, torch.multinomial(model(tokens)[:, -1].softmax(-1), 1)], 1)
    return tokens[torch.randperm(batch_size)]


@pytest.mark.parametrize(("is_causal", "lengths"), [(True, {64, 70}), (False, set(range(1, 71)))])
def test_texts_are_those_that_grow_token_by_token(is_causal, lengths):
    torch.manual_seed(1)
    model = Attention(is_causal)
    expected = write_growing(model, 70, 5)
    ((tokens, following),) = ob.synthetic_text([model], 70, num_batches=1, batch_size=5)
    assert torch.equal(torch.cat([tokens, following[:, -1:]], 1), expected)
    assert set(Attention.lengths[-70:]) == lengths


def test_the_seed_decides():
    first, again, other = (ob.synthetic_text([Chain()], 3, 1, 6, seed=seed)[0][0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_texts_begin_with_the_start():
    ((tokens, _),) = ob.synthetic_text([Chain()], 3, num_batches=1, batch_size=4, start=5)
    assert tokens.tolist() == [[5, 6, 7]] * 4


def test_models_are_left_as_they_are():
    model = Chain().train()
    ob.synthetic_text([model], 2, num_batches=1, batch_size=2)
    assert model.training
    assert model.table.requires_grad


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ([], {}, "at least one model"),
        ([nn.Linear(3, 3)], {}, "cannot be called with tokens"),
        ([Chain(), Chain(vocabulary=5)], {}, "different sizes: 5, 11"),
        ([nn.Sequential(nn.Embedding(5, 3), nn.Flatten())], {}, "scores of the next token"),
        ([Chain()], {"start": 11}, "from 0 to 10"),
        ([Chain()], {"length": 0}, "length"),
        ([Chain(), Chain()], {"batch_size": 1}, "batch_size"),
        ([Chain()], {"temperature": 0.0}, "temperature"),
    ],
)
def test_bad_input_is_refused(models, options, message):
    with pytest.raises(ValueError, match=message):
        ob.synthetic_text(models, **{"length": 4, **options})


def test_a_text_that_is_longer_than_the_model_takes_is_refused():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.places, self.head = nn.Embedding(7, 4), nn.Embedding(6, 4), nn.Linear(4, 7)

        def forward(self, tokens):
            return self.head(self.embed(tokens) + self.places(torch.arange(tokens.shape[1])))

    assert ob.synthetic_text([Positions()], 6, num_batches=1, batch_size=2)[0][0].shape == (2, 6)
    with pytest.raises(ValueError, match="cannot be called with 9 tokens"):
        ob.synthetic_text([Positions()], 9)
