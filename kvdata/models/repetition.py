"""Which tokens of a prefix say something again, told from the cache alone.

Axes: ``B`` batch, ``2`` K/V, ``L`` layers, ``T`` tokens, ``D = H * head_dim``, ``R`` features.

The first layer's values are a function of the token alone: no layer has mixed in a context, and values carry no
position. Equal tokens have equal ones there, up to rounding. From that follows how common a token is, how long a
passage it repeats, and where the text would go on if its end were a repetition (as induction heads do, arXiv
2209.11895). A cache whose first values are all different has no repetitions, and these features say so.
"""

from __future__ import annotations

from itertools import accumulate, repeat

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

FEATURES = 17
RECENT = (64, 256)  # tokens at the end, in which a token or its predecessor is looked for
ENDS = (16, 64)  # tokens at the end that are laid over the rest
SPREADS = (1, 32, 128)  # tokens that a repetition may go on for
LONGEST = 8  # tokens of a repeated passage that are counted
NEIGHBOURS = 21
TOLERANCE = 0.02  # of a value's length; bfloat16 rounds each number to 0.004 of itself


@torch.no_grad()
def repetition(kv: Tensor) -> Tensor:
    """How the tokens of caches ``[B, 2, L, T, D]`` repeat each other: ``[B, T, R]``, float32.

    Takes 0.02 s for 1,024 tokens; time and memory grow with the square of T, as those of attention do.
    """
    same = same_tokens(kv[:, 1, 0])
    runs = passage_lengths(same)
    others = runs - torch.diag_embed(runs.diagonal(dim1=1, dim2=2))
    count = same.sum(2).log()
    longest = others.amax(2).log1p()
    found = torch.stack([count, *_occurrences(same), *_passages(others), *_continued(runs, count)], dim=-1)
    return torch.cat((found, _averaged(torch.stack((count, longest), dim=-1))), dim=-1)


def same_tokens(values: Tensor) -> Tensor:
    """Which tokens are the same, by the first layer's values: ``[B, T, D] -> [B, T, T]`` of ones and zeros."""
    rows = values.float()
    squares = rows.square().sum(-1)
    apart = squares[:, :, None] + squares[:, None] - 2 * rows @ rows.mT
    return (apart <= TOLERANCE**2 * squares[:, None]).float()


def passage_lengths(same: Tensor) -> Tensor:
    """How many tokens up to i and up to j are the same, at most `LONGEST`: ``[B, T, T] -> [B, T, T]``."""
    steps = accumulate(repeat(same, LONGEST), lambda run, _: pad(run[:, :-1, :-1], (1, 0, 1, 0)) * same)
    return sum(steps, torch.zeros_like(same))


def _occurrences(same: Tensor) -> list[Tensor]:
    """How often a token occurs before and after itself, and how often it and its predecessor do lately."""
    after_it = pad(same[:, :-1], (0, 0, 1, 0))  # of the predecessor
    lately = [rows[:, :, -size:].sum(2) for size in RECENT for rows in (same, after_it)]
    return [count.log1p() for count in (same.tril(-1).sum(2), same.triu(1).sum(2), *lately)]


def _passages(others: Tensor) -> list[Tensor]:
    """The longest passage that ends in a token and stands earlier, or later, too."""
    return [others.tril().amax(2).log1p(), others.triu().amax(2).log1p()]


def _continued(runs: Tensor, count: Tensor) -> list[Tensor]:
    """How well the prefix's end fits what is before each token, which then would come next: ``6`` of ``[B, T]``.

    Repeated passages count by their length, and by how rare their tokens are.
    """
    length = runs.shape[1]
    rare = 1 - count / max(torch.tensor(length).log().item(), 1e-6)
    found = []
    for end in (min(size, length) for size in ENDS):
        back = torch.arange(1, end + 1, device=runs.device)
        before = torch.arange(length, device=runs.device)[:, None] - back  # [T, end]
        fits = runs[:, before.clamp_min(0), length - back] * rare[:, length - back][:, None] * (before >= 0)
        place = fits.mean(2)
        found += [max_pool1d(pad(place[:, None], (size - 1, 0)), size, 1)[:, 0] for size in SPREADS]
    return found


def _averaged(x: Tensor) -> Tensor:
    """The mean over `NEIGHBOURS` tokens: ``[B, T, C] -> [B, T, C]``; one odd word is less than an odd sentence."""
    pooled = avg_pool1d(x.mT, NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2, count_include_pad=False)
    return pooled.mT
