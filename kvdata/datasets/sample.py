"""What a sample is, whether its KV comes from a server or from a snapshot.

Axes: ``2`` K/V, ``L'`` layers that are read, ``T`` tokens, ``D`` hidden, ``N`` continuation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from kvdata.datasets.prefixes import PrefixRecord

Sample: TypeAlias = dict[str, Any]
# Gives the buffer of a batch: its shape ``[B, 2, L', T, D]`` and dtype -> a CPU tensor.
Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
Transform: TypeAlias = Callable[[Sample], Sample]


def make_sample(
    record: PrefixRecord, index: int, kv: torch.Tensor, hit: int, transform: Transform | None = None
) -> Sample:
    """One sample of the first ``hit`` tokens of a prefix.

    Args:
        record: the prefix.
        index: its place in the dataset.
        kv: ``[2, L', T, D]``.
        hit: tokens that were cached.
        transform: applied last.
    """
    sample: Sample = {
        "kv": kv,
        "tokens": torch.from_numpy(record.tokens[:hit]),
        "index": index,
        "hit_tokens": hit,
        "continuation": torch.from_numpy(_following(record, hit)),
        "meta": record.meta,
    }
    return sample if transform is None else transform(sample)


def _following(record: PrefixRecord, hit: int) -> np.ndarray:
    """The true continuation of the ``hit`` cached tokens: it begins with the prefix's own tokens after them."""
    if not len(record.continuation):
        return record.continuation
    return np.concatenate((record.tokens[hit:], record.continuation))
