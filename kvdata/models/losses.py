"""Losses for models that compress caches.

Axes: ``B`` batch, ``L`` layers, ``H`` KV heads, ``T`` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdata.errors import GeometryMismatch


def scorer_loss(scores: Tensor, target: Tensor, sinks: int = 4, window: int = 32) -> Tensor:
    """Listwise loss of a token scorer: cross entropy between target and scores as distributions over tokens.

    ``-sum_t p_t log softmax(scores)_t`` with ``p = target / sum(target)`` (ListNet, Cao et al. 2007),
    averaged over samples, layers and heads. A selection only needs the order of the tokens of one head, and
    pays for the attention that it drops; a regression on log attention (as in KVzap) spends its capacity on
    scales and on tokens that nobody reads.

    Args:
        scores: ``[B, L, H, T]``.
        target: ``[B, L, H, T]``, non-negative: `attention_target` of the continuation's attention.
        sinks, window: first and last tokens that are always kept, and so not learned. Give 0 and 0 when
            scores and target hold a sample of the tokens between (`sample_tokens`).

    Raises:
        GeometryMismatch: the shapes differ.
    """
    if scores.shape != target.shape:
        raise GeometryMismatch(f"scores {tuple(scores.shape)} and target {tuple(target.shape)} differ in shape")
    free = slice(sinks, scores.shape[-1] - window)
    wanted = target[..., free].float()
    wanted = wanted / wanted.sum(dim=-1, keepdim=True).clamp_min(1e-9)
    return -(wanted * scores[..., free].float().log_softmax(dim=-1)).sum(dim=-1).mean()


def sample_tokens(
    length: int, count: int, sinks: int = 4, window: int = 32, generator: torch.Generator | None = None
) -> Tensor:
    """`count` random token indices between sinks and window, sorted (all of them, if there are fewer).

    Scoring a sample per step makes a step cheaper, and so buys more steps in the same time.
    """
    free = max(length - sinks - window, 0)
    chosen = torch.randperm(free, generator=generator)[:count]
    return (chosen + sinks).sort().values


def variance_explained(scores: Tensor, target: Tensor, sinks: int = 4, window: int = 32) -> Tensor:
    """R2 of each layer's scores as predictors of log attention, by the best line through them: ``[L]``.

    The listwise loss leaves a head's scale and offset free, and so does this: it is the squared correlation, in
    each sample and head over the tokens between sinks and window, averaged.
    """
    free = slice(sinks, scores.shape[-1] - window)
    x, y = scores[..., free].float(), target[..., free].float().clamp_min(1e-6).log()
    return (
        torch.cosine_similarity(x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True), dim=-1)
        .square()
        .mean((0, 2))
    )


def top_k_overlap(scores: Tensor, target: Tensor, keep: int, sinks: int = 4, window: int = 32) -> Tensor:
    """Share of the oracle's choice that the scores choose too, at a budget of `keep` tokens: a scalar.

    Both must keep sinks and window, so that only the ``keep - sinks - window`` others are compared.
    """
    free = slice(sinks, scores.shape[-1] - window)
    count = max(1, keep - sinks - window)
    chosen = torch.zeros_like(scores[..., free], dtype=torch.bool)
    chosen.scatter_(-1, scores[..., free].topk(count).indices, True)
    return chosen.gather(-1, target[..., free].topk(count).indices).float().mean()
