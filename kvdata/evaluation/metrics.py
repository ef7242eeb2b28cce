"""Per-window metrics of a continuation, and paired intervals over windows.

Axes: ``B`` windows, ``N`` continuation tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def next_token_nll(logits: Tensor, continuation: Tensor) -> Tensor:
    """Mean negative log-likelihood of tokens ``1 .. N-1`` in nats, ``[B]``.

    ``logits[:, i]`` (``[B, N, V]``) predicts token ``i + 1``, so the first token, which the prefix alone would
    have to predict, is not scored.
    """
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), continuation[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(logits), -1).mean(1)


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Mean ``KL(reference || logits)`` over the scored positions in nats, ``[B]``; both ``[B, N, V]``."""
    p = torch.log_softmax(reference[:, :-1].float(), -1)
    q = torch.log_softmax(logits[:, :-1].float(), -1)
    return (p.exp() * (p - q)).sum(-1).mean(1)


def top1_agreement(reference: Tensor, logits: Tensor) -> Tensor:
    """Share of scored positions where both would choose the same token, ``[B]``."""
    return (reference[:, :-1].argmax(-1) == logits[:, :-1].argmax(-1)).float().mean(1)


def scored(logits: Tensor, continuation: Tensor, cue: int) -> tuple[Tensor, Tensor]:
    """Logits and tokens from the last of the first `cue` tokens on, which are given and not scored."""
    return logits[:, cue - 1 :], continuation[:, cue - 1 :]


def mean_interval(values: Sequence[float], level: float = 0.9, resamples: int = 10_000) -> tuple[float, float]:
    """Bootstrap percentile interval of the mean of paired differences, one per window (seeded)."""
    from scipy.stats import bootstrap

    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2 or np.ptp(sample) == 0:
        return float(sample.mean()), float(sample.mean())
    found = bootstrap((sample,), np.mean, confidence_level=level, n_resamples=resamples, **_resampling())
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def ratio_interval(
    values: Sequence[float], others: Sequence[float], level: float = 0.9, resamples: int = 10_000
) -> tuple[float, float]:
    """Bootstrap percentile interval of ``mean(values) / mean(others)``, both of the same windows (seeded).

    Where resamples reach an others' mean of zero or less, the ratio means nothing: the interval is then wide.
    """
    from scipy.stats import bootstrap

    data = (np.asarray(values, dtype=np.float64), np.asarray(others, dtype=np.float64))
    if len(data[0]) < 2 or np.ptp(data[0]) == np.ptp(data[1]) == 0:
        return _ratio(*data), _ratio(*data)
    found = bootstrap(data, _ratio, paired=True, confidence_level=level, n_resamples=resamples, **_resampling())
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def share_interval(found: int, tries: int, level: float = 0.9) -> tuple[float, float]:
    """Wilson interval of a share of successes."""
    from scipy.stats import binomtest

    interval = binomtest(found, tries).proportion_ci(level, method="wilson")
    return float(interval.low), float(interval.high)


def _resampling() -> dict[str, Any]:
    return {"method": "percentile", "rng": np.random.default_rng(0)}


def _ratio(values: np.ndarray, others: np.ndarray, axis: int = -1) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.mean(values, axis) / np.mean(others, axis)
