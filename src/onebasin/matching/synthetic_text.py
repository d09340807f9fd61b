"""Texts that language models write themselves, for those who have no data.

A model of the next token is a model of its training data: what it writes, token by token, stands in for that data.
Activations are compared and bases learned on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import copy_model
from onebasin.matching.methods.base import check_count, check_number
from onebasin.tensors.progress import Progress, show_progress
from onebasin.tensors.seeding import seeded

_BLOCK = 64
"""Causal models are called with this many tokens, twice as many and so on. Memory for each length in between would be set
aside once and fit no other."""


def synthetic_text(
    models: Sequence[nn.Module],
    length: int,
    num_batches: int = 8,
    batch_size: int = 32,
    temperature: float = 1.0,
    start: int | None = None,
    seed: int = 0,
    progress: bool | Progress = False,
) -> list[tuple[Tensor, Tensor]]:
    """Let models of the next token write texts: each an equal share of every batch.

    Args:
        models: take tokens (batch, position) and return scores (batch, position, vocabulary), by themselves or as
            ``.logits``; left untouched.
        length: the tokens of a text, without the one that is predicted last.
        num_batches: how many batches to write.
        batch_size: texts in each; at least one for each model.
        temperature: of the draws: 1 as the models would have it, less for likelier texts.
        start: the first token of every text; drawn evenly from the vocabulary if None.
        seed: for all draws.
        progress: show a progress line; or a function to call with what is done, how far, and how much there is.

    Returns:
        Pairs (tokens, the tokens that follow each), (batch_size, length) both, as `onebasin.align` and `onebasin.merge` take
        them for ``data=``.

    Raises:
        ValueError: if a model does not return scores for the next token, or the vocabularies differ.

    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    >>> ((tokens, following),) = ob.synthetic_text([model], 5, num_batches=1, batch_size=3)
    >>> tokens.shape, following.shape
    (torch.Size([3, 5]), torch.Size([3, 5]))
    """
    for name, count in {"length": length, "num_batches": num_batches}.items():
        check_count(name, count, at_least=1)
    if not models:
        raise ValueError("synthetic text is written by at least one model")
    check_count("batch_size", batch_size, at_least=len(models))
    check_number("temperature", temperature, above=0)
    copies = [copy_model(model).requires_grad_(False).eval() for model in models]
    device = next(copies[0].parameters()).device
    try:
        sizes = {_score(model, torch.zeros(1, 1, dtype=torch.long, device=device)).shape[-1] for model in copies}
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(f"a model cannot be called with tokens (batch, position): {error}") from error
    if len(sizes) > 1:
        raise ValueError(f"the models have vocabularies of different sizes: {', '.join(map(str, sorted(sizes)))}")
    (vocabulary,) = sizes
    for model in copies:
        try:
            _score(model, torch.zeros(1, length, dtype=torch.long, device=device))
        except (RuntimeError, IndexError, ValueError) as error:
            raise ValueError(f"a model cannot be called with {length} tokens: {error}") from error
    if start is not None and not 0 <= start < vocabulary:
        raise ValueError(f"start must be a token from 0 to {vocabulary - 1}, got {start}")
    blocks = [_BLOCK if _is_causal(model, vocabulary, length, device) else 1 for model in copies]
    batches = []
    with show_progress(progress) as show, seeded(seed, device), torch.no_grad():
        for number in range(num_batches):
            show("synthetic texts", number, num_batches)
            firsts = torch.randint(0, vocabulary, (batch_size, 1), device=device)
            firsts = firsts if start is None else torch.full_like(firsts, start)
            shares = firsts.tensor_split(len(copies))
            writers = zip(copies, shares, blocks, strict=True)
            parts = [_write(model, part, length, temperature, block) for model, part, block in writers]
            text = torch.cat(parts)[torch.randperm(batch_size, device=device)]
            batches.append((text[:, :-1].contiguous(), text[:, 1:].contiguous()))
    return batches


def _write(model: nn.Module, first: Tensor, length: int, temperature: float, block: int) -> Tensor:
    """Texts that begin with a token. A model is called with a multiple of `block` tokens, of which the last are zeros."""
    tokens = torch.cat([first, first.new_zeros(len(first), length)], 1)
    for position in range(length):
        end = min((position // block + 1) * block, length)
        chances = (_score(model, tokens[:, :end].contiguous())[:, position].float() / temperature).softmax(-1)
        tokens[:, position + 1] = torch.multinomial(chances, 1).squeeze(1)
    return tokens


@torch.no_grad()
def _is_causal(model: nn.Module, vocabulary: int, length: int, device: torch.device) -> bool:
    """Whether the scores of tokens stay the same when others follow them, on a random text that is cut at three places."""
    generator = torch.Generator().manual_seed(0)
    text, other = torch.randint(0, vocabulary, (2, 1, length), generator=generator).to(device)
    whole = _score(model, text)
    for cut in {1, (length + 1) // 2, length}:
        changed = torch.cat([text[:, :cut], other[:, cut:]], 1)
        scores = [_score(model, tokens)[:, :cut] for tokens in (changed, text[:, :cut])]
        # Sums over another number of tokens are rounded in another way.
        rounding = torch.finfo(whole.dtype).eps ** 0.5 * float(whole.abs().max())
        if not all(torch.allclose(whole[:, :cut], each, rtol=0, atol=rounding) for each in scores):
            return False
    return True


def _score(model: nn.Module, tokens: Tensor) -> Tensor:
    output: Any = model(tokens)
    scores = getattr(output, "logits", output)
    if not isinstance(scores, Tensor) or scores.dim() != 3 or scores.shape[:2] != tokens.shape:
        raise ValueError("synthetic text is for models that return scores of the next token at every position")
    return scores
