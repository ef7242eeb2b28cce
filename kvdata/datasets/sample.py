"""What a dataset of caches yields, wherever the cache was read from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from kvdata.client.selection import Selection
from kvdata.datasets.prefixes import PrefixRecord

Sample: TypeAlias = dict[str, Any]
Transform: TypeAlias = Callable[[Sample], Sample]


def make_sample(
    kv: torch.Tensor, index: int, record: PrefixRecord, hit: int, salt: str, selection: Selection
) -> Sample:
    """One sample: ``kv`` is the selected part of the ``hit`` cached tokens of a record."""
    tokens = selection.tokens(hit)
    return {
        "kv": kv,
        "tokens": torch.from_numpy(record.tokens[tokens.start : tokens.stop]),
        "index": index,
        "start": tokens.start,
        "hit_tokens": hit,
        "continuation": torch.from_numpy(_following(record, tokens.stop)),
        "salt": salt,
        "meta": record.meta,
    }


def _following(record: PrefixRecord, position: int) -> np.ndarray:
    """The true continuation from a position on: it begins with the prefix's own tokens after it."""
    if not len(record.continuation):
        return record.continuation
    return np.concatenate((record.tokens[position:], record.continuation))
