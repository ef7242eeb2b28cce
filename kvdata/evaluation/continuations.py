"""What is read after a cache: the true continuation, and passages of the prefix that are to be recalled."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

NEXT = "next"
RECALL_DEPTHS = (0.25, 0.75)
CUE = 16
RECALLED = 48


@dataclass(frozen=True)
class Continuation:
    """Tokens fed after a cache.

    Attributes:
        kind: ``"next"``, or ``"recall 25 %"``: where in the prefix the passage begins.
        ids: ``[N]`` int64.
        cue: how many of them are given and not scored.
    """

    kind: str
    ids: Tensor = field(repr=False)
    cue: int


def continuations(tokens: Tensor, following: Tensor) -> list[Continuation]:
    """The true continuation of `tokens` ``[T]``, then their passages at `RECALL_DEPTHS`.

    A recalled passage is `CUE` + `RECALLED` tokens, less where a quarter of the prefix is less.
    """
    length = min(CUE + RECALLED, len(tokens) // 4)
    cue = min(CUE, length // 2)
    found = [Continuation(NEXT, following, 1)]
    for depth in RECALL_DEPTHS:
        start = int(depth * len(tokens))
        found.append(Continuation(f"recall {100 * depth:g} %", tokens[start : start + length].clone(), cue))
    return found


def stacked(ids: Tensor, rows: int) -> Tensor:
    """``[N]`` -> ``[rows, N]``: the same tokens after each of several caches."""
    return torch.as_tensor(ids).expand(rows, -1)
