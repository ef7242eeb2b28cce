"""Policies that see only the cache: K, V and positions.

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``T`` tokens, ``D = H * head_dim``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvdata.edits.policies.base import Policy, Sees, Source, need
from kvdata.edits.policies.refit import ValueRefit
from kvdata.edits.selection import split_heads
from kvdata.errors import InvalidRequest


@dataclass(frozen=True)
class Random(Policy):
    """Uniformly random tokens per layer and head; the same for the same sample and seed."""

    seed: int = 0
    name: str = "random"

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        # A generator of its own: neither torch's global state nor the order of the samples matters.
        generator = torch.Generator().manual_seed(_sample_seed(self.seed, source))
        return torch.rand(kv.shape[1], num_kv_heads, kv.shape[2], generator=generator)


@dataclass(frozen=True)
class Recency(Policy):
    """The last tokens, besides the sinks (StreamingLLM, arXiv 2309.17453)."""

    name: str = "recency"

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        return torch.arange(kv.shape[2], dtype=torch.float32).expand(kv.shape[1], num_kv_heads, -1)


@dataclass(frozen=True)
class KeyNorm(Policy):
    """Tokens whose keys have a small L2 norm: they draw more attention (arXiv 2406.11430)."""

    name: str = "key-norm"

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(by_head(kv[0], num_kv_heads), dim=-1)
        return -norms


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Tokens whose keys are least similar (cosine) to the mean direction of all keys (arXiv 2504.15364)."""

    name: str = "keydiff"

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        unit = torch.nn.functional.normalize(by_head(kv[0], num_kv_heads), dim=-1)
        return -torch.cosine_similarity(unit, unit.mean(dim=-2, keepdim=True), dim=-1)


@dataclass(frozen=True)
class ValueNorm(Policy):
    """Tokens whose values have a large L2 norm: what a token can add to an output (arXiv 2406.12335)."""

    name: str = "value-norm"

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(by_head(kv[1], num_kv_heads), dim=-1)
        return norms


@dataclass(frozen=True)
class Learned(Policy):
    """Any trained scorer: a callable ``[1, 2, L, T, D] -> [1, L, H, T]``, e.g. a `TokenScorer`.

    Args:
        scorer: scores a cache.
        refit: makes the kept tokens' values speak for those that are dropped; None keeps them as they are.
    """

    scorer: Callable[[Tensor], Tensor]
    name: str = "learned"
    refit: ValueRefit | None = None
    trained: ClassVar[bool] = True

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        with torch.inference_mode():
            return self.scorer(kv.unsqueeze(0))[0].float()

    def merge(self, kv: Tensor, kept: Tensor, source: Source) -> Tensor:
        return super().merge(kv, kept, source) if self.refit is None else self.refit(kv, kept)


@dataclass(frozen=True)
class Oracle(Policy):
    """The attention that the real continuation pays: what a perfect predictor of the target would keep."""

    name: str = "oracle"
    sees: ClassVar[Sees] = Sees.FUTURE

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        return need(source.target, self, "target=..., the future's attention [L, H, T]").float()


def by_head(x: Tensor, num_kv_heads: int) -> Tensor:
    """``[L, T, D]`` -> ``[L, H, T, head_dim]`` in float32."""
    return split_heads(x.float(), num_kv_heads).transpose(1, 2)


def _sample_seed(seed: int, source: Source) -> int:
    """A seed for `torch.Generator`, from the sample's index or else a polynomial hash of its tokens."""
    if source.index is None and source.tokens is None:
        raise InvalidRequest("the random policy needs Source(tokens=...) or Source(index=...) to be repeatable")
    identity = [source.index] if source.index is not None else list(source.tokens or ())
    state = seed + 1
    for value in identity:
        state = (state * 6364136223846793005 + int(value) + 1442695040888963407) % 2**63
    return state
