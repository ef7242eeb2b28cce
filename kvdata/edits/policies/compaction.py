"""Attention matching: keep keys, and refit their values so that attention says what it said over the full cache.

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``G`` query heads that share a KV head, ``T`` tokens, ``K`` kept tokens,
``R`` reference queries, ``d`` head_dim, ``D = H * d``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvdata.edits.policies.base import Source
from kvdata.edits.policies.queries import QueryPolicy, by_group, heads, prefix_queries
from kvdata.edits.selection import gather, relocate


@dataclass(frozen=True)
class Compaction(QueryPolicy):
    """Attention matching in closed form, without its bias on the logits (arXiv 2602.16284, beta = 0).

    Reference queries are the prefix's own, evenly spaced, asked again from positions after the prefix, where they see
    all of it. Kept are the keys of the greatest root mean square attention. The values are then fitted by ridge
    regression towards what they were, in the geometry of the compressed cache: keys at ``0 .. K-1``, then the queries.

    Args:
        references: number of reference queries per query head.
        future: positions after the prefix over which they are spread.
        ridge: weight of staying at the old values, relative to the mean squared attention a slot gets.
    """

    references: int = 256
    future: int = 128
    ridge: float = 0.1
    name: str = "compaction"

    def ask(self, kv: Tensor, source: Source) -> Tensor:
        return self.reference_queries(kv, source, kv.shape[2])

    def layer_scores(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.logits(queries, keys).softmax(-1).square().mean((1, 2)).sqrt()

    def merge(self, kv: Tensor, kept: Tensor, source: Source) -> Tensor:
        num_kv_heads, slots = kept.shape[1:]
        merged = gather(kv, kept)
        moved = relocate(merged.clone(), kept, self.rope)
        asked = by_group(self.reference_queries(kv, source, kv.shape[2]), kv, num_kv_heads)
        asked_again = by_group(self.reference_queries(kv, source, slots), kv, num_kv_heads)
        for layer in range(kv.shape[1]):
            keys, values, new_keys, old_values = (
                heads(part[layer], num_kv_heads) for part in (kv[0], kv[1], moved[0], moved[1])
            )
            target = self.attention(asked[layer], keys) @ values
            fitted = refit(self.attention(asked_again[layer], new_keys), old_values, target, self.ridge)
            merged[1, layer] = fitted.transpose(0, 1).flatten(-2)
        return merged

    def reference_queries(self, kv: Tensor, source: Source, length: int) -> Tensor:
        """``[L, Hq, R, d]``, rotated to positions from `length` on."""
        queries = prefix_queries(self, kv, source)
        count = min(self.references, queries.shape[2])
        numbers = torch.arange(count, device=kv.device)
        chosen = queries[:, :, (numbers + 1) * queries.shape[2] // count - 1]
        return self.rope.rerotate(chosen, 0, length + numbers * self.future // count)

    def attention(self, queries: Tensor, keys: Tensor) -> Tensor:
        """One row per query of a KV head's group: ``[H, G, R, d]`` and ``[H, n, d]`` -> ``[H, G * R, n]``."""
        return self.logits(queries, keys).softmax(-1).flatten(1, 2)


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
