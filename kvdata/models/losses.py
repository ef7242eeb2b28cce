"""Losses for models that compress caches.

Axes: ``B`` batch, ``L`` layers, ``H`` KV heads, ``T`` tokens.

Recipe for a `TokenScorer` (SmolLM2-135M, 110 windows of 512 tokens): 8 epochs of batches of 2, 128 tokens sampled
per step (`sample_tokens`), AdamW with lr 4e-3, betas (0.9, 0.98) and weight decay 0.05, 20 steps of warm-up then
cosine to 0, gradient norm clipped at 1. More epochs or a smaller lr (2e-3) change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdata.errors import GeometryMismatch


def scorer_loss(scores: Tensor, target: Tensor, sinks: int = 4, window: int = 32) -> Tensor:
    """Listwise loss of a token scorer: cross entropy between target and scores as distributions over tokens.

    ``-sum_t p_t log softmax(scores)_t`` with ``p = target / sum(target)`` (ListNet, Cao et al. 2007),
    averaged over samples, layers and heads. A selection only needs the order of the tokens of one head, and
    pays for the attention *mass* that it drops; a regression on log attention (as in KVzap) spends its
    capacity on scales and on tokens that nobody reads.

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
