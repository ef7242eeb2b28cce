"""What a policy is: it scores tokens. Selection, sinks, window and key rotation are the same for all.

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``Hq`` query heads, ``T`` tokens, ``K`` kept tokens, ``N`` tokens of a
question, ``D = H * head_dim``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from torch import Tensor

from kvdata.edits.rope import Rope
from kvdata.edits.selection import gather, relocate, select
from kvdata.errors import GeometryMismatch, InvalidRequest


class Sees(str, Enum):
    """What a policy looks at. Policies are compared only with others that see the same."""

    CACHE = "cache"  # K, V and positions
    QUERIES = "queries"  # also the queries that the model asked over the prefix
    QUESTION = "question"  # also what is asked about the prefix later
    FUTURE = "future"  # also the continuation: a bound, not a competitor


@dataclass(frozen=True)
class Source:
    """What a policy may know of a sample besides its cache.

    Args:
        tokens: the prefix's token ids.
        index: the sample's index in its dataset.
        queries: ``[L, Hq, T, head_dim]``, the prefix's own queries before RoPE (`HuggingFaceEngine.queries`).
        question: ``[L, Hq, N, head_dim]``, the queries before RoPE of a question that follows the prefix.
        target: ``[L, H, T]``, the future's attention to each token; only an oracle may look at it.
    """

    tokens: Sequence[int] | None = field(default=None, repr=False)
    index: int | None = None
    queries: Tensor | None = field(default=None, repr=False)
    question: Tensor | None = field(default=None, repr=False)
    target: Tensor | None = field(default=None, repr=False)


class Policy(ABC):
    """Scores tokens; higher is more worth keeping. A new policy is a class with a name and `scores`."""

    name: str
    """Short, usable in a cache salt."""

    sees: ClassVar[Sees] = Sees.CACHE
    trained: ClassVar[bool] = False
    """True when the scores come from learned weights."""

    @abstractmethod
    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        """``[2, L, T, D]`` -> ``[L, H, T]``, float32."""

    def merge(self, kv: Tensor, kept: Tensor, source: Source) -> Tensor:
        """What the kept slots hold, ``[2, L, T, D]`` and ``[L, H, K]`` -> ``[2, L, K, D]``; keys rotated as in `kv`.

        A policy that moves what it drops into what it keeps overrides this.
        """
        return gather(kv, kept)


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
        source: the sample's tokens, index, queries or target, for policies that need them.
        sinks, window, per_head: see `select`; the same for all policies, so that only scores are compared.

    Returns:
        The compressed cache and the kept indices ``[L, H, keep]``.

    Raises:
        InvalidRequest: `keep` does not fit, scores are NaN, or the policy lacks what it needs of `source`.
        GeometryMismatch: the policy's scores are not ``[L, H, T]``.
    """
    (result,) = apply_policy_at(policy, kv, (keep,), rope, num_kv_heads, source, sinks, window, per_head)
    return result


def apply_policy_at(
    policy: Policy,
    kv: Tensor,
    keeps: Sequence[int],
    rope: Rope,
    num_kv_heads: int,
    source: Source | None = None,
    sinks: int = 4,
    window: int = 32,
    per_head: bool = True,
) -> list[tuple[Tensor, Tensor]]:
    """`apply_policy` at several budgets; the tokens are scored once."""
    known = source or Source()
    scores = policy.scores(kv, num_kv_heads, known)
    if scores.shape != (kv.shape[1], num_kv_heads, kv.shape[2]):
        raise GeometryMismatch(
            f"policy {policy.name!r} scored {tuple(scores.shape)}, "
            f"the cache needs {(kv.shape[1], num_kv_heads, kv.shape[2])} (layers, KV heads, tokens)"
        )
    choices = [select(scores, keep, sinks=sinks, window=window, per_head=per_head) for keep in keeps]
    return [(relocate(policy.merge(kv, kept, known), kept, rope), kept) for kept in choices]


def need(value: Tensor | None, policy: Policy, what: str) -> Tensor:
    """A field of `Source` that a policy cannot do without."""
    if value is None:
        raise InvalidRequest(f"the {policy.name} policy needs Source({what})")
    return value
