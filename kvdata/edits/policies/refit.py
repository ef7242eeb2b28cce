"""Refitting the values of kept tokens, so that attention over them says what it said over the whole cache.

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``G`` query heads that share a KV head, ``Hq = H * G`` query heads,
``T`` tokens, ``K`` kept tokens, ``R`` reference queries, ``M = G * R``, ``d`` head_dim, ``D = H * d``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdata.edits.policies.queries import by_group, heads
from kvdata.edits.rope import Rope
from kvdata.edits.selection import gather, relocate

REFERENCES, FUTURE, RIDGE = 512, 128, 0.1


@dataclass(frozen=True)
class ValueRefit:
    """The values' half of attention matching (arXiv 2602.16284, beta = 0), for queries that somebody predicts.

    Args:
        queries: before RoPE, of the tokens at given indices: ``([1, 2, L, T, D], [R]) -> [L, 1, Hq, R, d]``, such as a
            `QueryPredictor`.
        rope: the model's.
        references: number of reference queries per query head.
        future: positions after the prefix over which they are spread.
        ridge: see `refit_values`.
    """

    queries: Callable[[Tensor, Tensor], Tensor]
    rope: Rope
    references: int = REFERENCES
    future: int = FUTURE
    ridge: float = RIDGE

    def __call__(self, kv: Tensor, kept: Tensor) -> Tensor:
        """What the kept slots hold, ``[2, L, T, D]`` and ``[L, H, K]`` -> ``[2, L, K, D]``."""
        with torch.inference_mode():
            asked = self.queries(kv.unsqueeze(0), evenly_spaced(kv.shape[2], self.references).to(kv.device))[:, 0]
        return refit_values(
            kv, kept, lambda length: asked_later(asked.float(), self.rope, length, self.future), self.rope, self.ridge
        )


def refit_values(
    kv: Tensor,
    kept: Tensor,
    ask: Callable[[int], Tensor],
    rope: Rope,
    ridge: float = RIDGE,
    scale: float | None = None,
) -> Tensor:
    """What kept slots hold once their values are fitted to what the whole cache says to reference queries.

    In the geometry of the compressed cache: keys at ``0 .. K-1``, then the queries.

    Args:
        kv: ``[2, L, T, D]``.
        kept: ``[L, H, K]``.
        ask: the reference queries as they are behind so many tokens: ``[L, Hq, R, d]``, rotated.
        rope: the model's.
        ridge: weight of staying at the old values, relative to the mean squared attention a slot gets.
        scale: factor of the attention logits; default ``1 / sqrt(d)``.

    Returns:
        ``[2, L, K, D]``, its keys rotated as in `kv`.
    """
    num_kv_heads, slots = kept.shape[1:]
    merged = gather(kv, kept)
    moved = relocate(merged.clone(), kept, rope)
    before, after = (by_group(ask(length), kv, num_kv_heads).flatten(2, 3) for length in (kv.shape[2], slots))
    for layer in range(kv.shape[1]):
        keys, values, new_keys, old_values = (heads(part[layer], num_kv_heads) for part in (*kv, *moved))
        target = _attention(before[layer], keys, scale) @ values
        fitted = refit(_attention(after[layer], new_keys, scale), old_values, target, ridge)
        merged[1, layer] = fitted.transpose(0, 1).flatten(-2)
    return merged


def evenly_spaced(tokens: int, references: int) -> Tensor:
    """Indices of the tokens whose queries are asked again, the last one among them."""
    count = min(references, tokens)
    return (torch.arange(count) + 1) * tokens // count - 1


def asked_later(queries: Tensor, rope: Rope, length: int, future: int) -> Tensor:
    """Queries before RoPE, ``[..., R, d]``, rotated to `future` positions behind `length` tokens."""
    count = queries.shape[-2]
    return rope.rerotate(queries, 0, length + torch.arange(count, device=queries.device) * future // count)


def refit(attention: Tensor, values: Tensor, target: Tensor, ridge: float) -> Tensor:
    """Values whose attention output is nearest to a target, and themselves near to the old ones.

    Minimises ``|A V' - target|^2 + w |V' - V|^2``, ``w = ridge * mean(diag(A^T A))``; exactly `V` if it has no error.

    Args:
        attention: ``[H, M, K]``.
        values: ``[H, K, d]``.
        target: ``[H, M, d]``.
        ridge: above 0.
    """
    gram = attention.mT @ attention
    weight = ridge * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    damped = gram + weight * torch.eye(gram.shape[-1], device=gram.device)
    step: Tensor = torch.linalg.solve(damped, attention.mT @ (target - attention @ values))
    return values + step


def _attention(queries: Tensor, keys: Tensor, scale: float | None) -> Tensor:
    """A row per query of a KV head's group: ``[H, M, d]`` and ``[H, n, d]`` -> ``[H, M, n]``."""
    return (queries @ keys.mT * (scale or keys.shape[-1] ** -0.5)).softmax(-1)
