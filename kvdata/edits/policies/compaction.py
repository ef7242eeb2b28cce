"""Attention matching: keep keys, and refit their values so that attention says what it said over the full cache.

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``G`` query heads that share a KV head, ``T`` tokens, ``K`` kept tokens,
``R`` reference queries, ``d`` head_dim, ``D = H * d``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvdata.edits.policies.base import Source
from kvdata.edits.policies.queries import QueryPolicy, prefix_queries
from kvdata.edits.policies.refit import FUTURE, REFERENCES, RIDGE, asked_later, evenly_spaced, refit_values


@dataclass(frozen=True)
class Compaction(QueryPolicy):
    """Attention matching in closed form, without its bias on the logits (arXiv 2602.16284, beta = 0).

    Reference queries are the prefix's own, evenly spaced, asked again from positions after the prefix, where they see
    all of it. Kept are the keys of the greatest root mean square attention. The values are then fitted to what they
    said, see `refit_values`.

    Args:
        references: number of reference queries per query head.
        future: positions after the prefix over which they are spread.
        ridge: weight of staying at the old values, relative to the mean squared attention a slot gets.
    """

    references: int = REFERENCES
    future: int = FUTURE
    ridge: float = RIDGE
    name: str = "compaction"

    def ask(self, kv: Tensor, source: Source) -> Tensor:
        return self.reference_queries(kv, source, kv.shape[2])

    def layer_scores(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.logits(queries, keys).softmax(-1).square().mean((1, 2)).sqrt()

    def merge(self, kv: Tensor, kept: Tensor, source: Source) -> Tensor:
        return refit_values(
            kv, kept, lambda length: self.reference_queries(kv, source, length), self.rope, self.ridge, self.scale
        )

    def reference_queries(self, kv: Tensor, source: Source, length: int) -> Tensor:
        """``[L, Hq, R, d]``, rotated to positions from `length` on."""
        queries = prefix_queries(self, kv, source)
        chosen = queries[:, :, evenly_spaced(queries.shape[2], self.references).to(kv.device)]
        return asked_later(chosen, self.rope, length, self.future)
