"""Token dropping policies: who decides which tokens a cache keeps.

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``T`` tokens, ``K`` kept tokens, ``D = H * head_dim``. A policy
only scores; selection, sinks, window and key re-rotation are the same for all (`apply_policy`). A new policy
is one class with `name`, `trained`, `oracle` and `scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvdata.edits.rope import Rope
from kvdata.edits.selection import compact, select, split_heads
from kvdata.errors import GeometryMismatch, InvalidRequest


@dataclass(frozen=True)
class Source:
    """What a policy may know of a sample besides its cache.

    Args:
        tokens: the prefix's token ids.
        index: the sample's index in its dataset.
        target: ``[L, H, T]``, the future's attention to each token; only an oracle may look at it.
    """

    tokens: Sequence[int] | None = None
    index: int | None = None
    target: Tensor | None = field(default=None, repr=False)


class Policy(Protocol):
    """Scores tokens; higher is more worth keeping."""

    @property
    def name(self) -> str:
        """Short, usable in a cache salt."""

    @property
    def trained(self) -> bool:
        """True when the scores come from learned weights."""

    @property
    def oracle(self) -> bool:
        """True when it looks at the future: a bound, not a competitor."""

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        """``[2, L, T, D]`` -> ``[L, H, T]``, float32."""


@dataclass(frozen=True)
class Random:
    """Uniformly random tokens per layer and head; the same for the same sample and seed."""

    seed: int = 0
    name: str = "random"
    trained: bool = False
    oracle: bool = False

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        # A generator of its own: neither torch's global state nor the order of the samples matters.
        generator = torch.Generator().manual_seed(_sample_seed(self.seed, source))
        return torch.rand(kv.shape[1], num_kv_heads, kv.shape[2], generator=generator)


@dataclass(frozen=True)
class Recency:
    """The last tokens, besides the sinks (StreamingLLM, arXiv 2309.17453)."""

    name: str = "recency"
    trained: bool = False
    oracle: bool = False

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        return torch.arange(kv.shape[2], dtype=torch.float32).expand(kv.shape[1], num_kv_heads, -1)


@dataclass(frozen=True)
class KeyNorm:
    """Tokens whose keys have a small L2 norm: they draw more attention (arXiv 2406.11430)."""

    name: str = "key-norm"
    trained: bool = False
    oracle: bool = False

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(_keys(kv, num_kv_heads), dim=-1)
        return -norms


@dataclass(frozen=True)
class KeyDiff:
    """Tokens whose keys are least similar (cosine) to the mean direction of all keys (arXiv 2504.15364)."""

    name: str = "keydiff"
    trained: bool = False
    oracle: bool = False

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        unit = torch.nn.functional.normalize(_keys(kv, num_kv_heads), dim=-1)
        return -torch.cosine_similarity(unit, unit.mean(dim=-2, keepdim=True), dim=-1)


@dataclass(frozen=True)
class Learned:
    """Any trained scorer: a callable ``[1, 2, L, T, D] -> [1, L, H, T]``, e.g. a `TokenScorer`."""

    scorer: Callable[[Tensor], Tensor]
    name: str = "learned"
    trained: bool = True
    oracle: bool = False

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        with torch.inference_mode():
            return self.scorer(kv.unsqueeze(0))[0].float()


@dataclass(frozen=True)
class Oracle:
    """The attention that the real continuation pays: what a perfect predictor of the target would keep."""

    name: str = "oracle"
    trained: bool = False
    oracle: bool = True

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        if source.target is None:
            raise InvalidRequest("the oracle policy needs Source(target=...), the future's attention [L, H, T]")
        return source.target.float()


TRAINING_FREE: tuple[Policy, ...] = (Random(), Recency(), KeyNorm(), KeyDiff())


def apply_policy(
    policy: Policy,
    kv: Tensor,
    keep: int,
    rope: Rope,
    num_kv_heads: int,
    source: Source | None = None,
    sinks: int = 4,
    window: int = 32,
    per_head: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compress a cache ``[2, L, T, D]`` to ``[2, L, keep, D]``, its keys at positions ``0 .. keep-1``.

    Args:
        source: the sample's tokens, index or target, for policies that need them.
        sinks, window, per_head: see `select`; the same for all policies, so that only scores are compared.

    Returns:
        The compressed cache and the kept indices ``[L, H, keep]``.

    Raises:
        InvalidRequest: `keep` does not fit, scores are NaN, or the policy lacks what it needs of `source`.
        GeometryMismatch: the policy's scores are not ``[L, H, T]``.
    """
    scores = policy.scores(kv, num_kv_heads, source or Source())
    if scores.shape != (kv.shape[1], num_kv_heads, kv.shape[2]):
        raise GeometryMismatch(
            f"policy {policy.name!r} scored {tuple(scores.shape)}, "
            f"the cache needs {(kv.shape[1], num_kv_heads, kv.shape[2])} (layers, KV heads, tokens)"
        )
    kept = select(scores, keep, sinks=sinks, window=window, per_head=per_head)
    return compact(kv, kept, rope), kept


def _keys(kv: Tensor, num_kv_heads: int) -> Tensor:
    """``[2, L, T, D]`` -> keys ``[L, H, T, head_dim]`` in float32."""
    return split_heads(kv[0].float(), num_kv_heads).transpose(1, 2)


def _sample_seed(seed: int, source: Source) -> int:
    """A seed for `torch.Generator`, from the sample's index or else a polynomial hash of its tokens."""
    if source.index is None and source.tokens is None:
        raise InvalidRequest("the random policy needs Source(tokens=...) or Source(index=...) to be repeatable")
    identity = [source.index] if source.index is not None else list(source.tokens or ())
    state = seed + 1
    for value in identity:
        state = (state * 6364136223846793005 + int(value) + 1442695040888963407) % 2**63
    return state
