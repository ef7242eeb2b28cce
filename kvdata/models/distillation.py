"""The loss of a model that learns to predict as another does, from the other's likeliest tokens.

Axes: ``V`` vocabulary, ``k`` likeliest tokens.
"""

from __future__ import annotations

from torch import Tensor


def top_k_of(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the k likeliest tokens: logits ``[..., V]`` -> ``[..., k]`` twice."""
    best = logits.topk(k, dim=-1)
    return best.values.float() - logits.float().logsumexp(dim=-1, keepdim=True), best.indices


def top_k_kl(log_probs: Tensor, indices: Tensor, logits: Tensor) -> Tensor:
    """``KL(teacher || student)`` in nats, ``[...]``, from the teacher's k likeliest tokens.

    All other tokens count as one event, whose probability is what is left in either distribution. So it is never
    above the full divergence, equals it for ``k = V``, and a student that puts mass on tokens beyond the k pays for it.

    Args:
        log_probs, indices: ``[..., k]``, from `top_k_of` the teacher's logits.
        logits: ``[..., V]``, the student's.
    """
    found = logits.gather(-1, indices).float() - logits.float().logsumexp(dim=-1, keepdim=True)
    probs = log_probs.exp()
    inside = (probs * (log_probs - found)).sum(dim=-1)
    # Below this, what is left is a rounding error of the sums.
    left, found_left = ((1 - p.sum(dim=-1)).clamp_min(1e-6) for p in (probs, found.exp()))
    return inside + left * (left.log() - found_left.log())
