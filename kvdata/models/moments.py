"""What a linear code of caches is fitted to: second moments of keys, values and of the queries that read them.

Axes: ``2`` K/V, ``L`` layers, ``B`` batch, ``T`` tokens, ``N`` queries, ``H`` KV heads, ``Hq`` query heads,
``D = H * head_dim``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdata.edits.rope import Rope
from kvdata.edits.selection import split_heads

OFFSETS = 4  # distances between query and key that are sampled for each cache

# First-order theory says 1. Measured on SmolLM2-135M at an eighth of the bytes, NLL increase: weight 1.33 gives 0.158,
# 0.33 gives 0.080 (12 windows); 0.33 gives 0.069, 0.17 gives 0.073 (8 windows).
KEY_WEIGHT = 1 / 3


class Moments:
    """Sums over caches; all in float64, so that the order of the caches does not matter.

    Args:
        num_layers, num_kv_heads, head_dim: geometry of the cache.
        rope: the model's rotary embedding.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, rope: Rope) -> None:
        size = num_kv_heads * head_dim
        self.rope, self.num_kv_heads = rope, num_kv_heads
        self.rows = torch.zeros((), dtype=torch.float64)
        self.asked = torch.zeros((), dtype=torch.float64)
        self.first = torch.zeros(2, num_layers, size, dtype=torch.float64)
        self.second = torch.zeros(2, num_layers, size, size, dtype=torch.float64)
        self.queries = torch.zeros(num_layers, num_kv_heads, head_dim, head_dim, dtype=torch.float64)

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """Everything that adds up, for an all-reduce between ranks."""
        return self.rows, self.asked, self.first, self.second, self.queries

    @torch.no_grad()
    def update(self, plain: Tensor, queries: Tensor, generator: torch.Generator | None = None) -> None:
        """Add caches.

        Args:
            plain: ``[2, L, B, T, D]``, keys without their rotation.
            queries: ``[B, L, Hq, N, head_dim]``, before RoPE, of the tokens that follow the caches.
            generator: draws the distances between queries and keys.
        """
        rows = plain.float().flatten(2, 3)
        self.rows += rows.shape[2]
        self.first += rows.sum(2)
        self.second += rows.mT @ rows
        by_layer = queries.float().transpose(0, 1)
        length, later = plain.shape[3], torch.arange(queries.shape[3])
        for key_at in torch.randint(length, (OFFSETS,), generator=generator).tolist():
            # q R(p) . k R(t) = q R(p - t) . k: seen from a key without rotation, the query turns.
            turned = self.rope.rerotate(by_layer, 0, length + later - key_at).transpose(1, 2)  # [L, Hq, B, N, head_dim]
            asked = turned.reshape(
                len(turned), self.num_kv_heads, -1, turned.shape[-1]
            )  # [L, H, Hq/H * B * N, head_dim]
            self.queries += asked.mT @ asked
            self.asked += asked.shape[2]

    def mean(self) -> Tensor:
        """``[2, L, D]`` of un-rotated keys and of values."""
        return (self.first / self.rows).float()

    def covariance(self) -> Tensor:
        """``[2, L, D, D]`` of un-rotated keys and of values."""
        mean = self.first / self.rows
        return (self.second / self.rows - mean.unsqueeze(-1) * mean.unsqueeze(-2)).float()

    def metric(self) -> Tensor:
        """``[2, L, D, D]``: what errors of a key and of a value do to a layer's attention output, per unit of output.

        To first order, ``softmax(s)`` averages value errors, and moves the output by ``a_t ds_t (v_t - o)`` for an
        error ``ds_t`` of a logit. With v - o about as large as the values vary, an error of a key counts by the
        variance of the logit that queries make of it, times the values' variance (and `KEY_WEIGHT`); an error of a
        value counts as is. Cross terms between heads are left out: they are apart until the output's projection.
        """
        values = split_heads(self.covariance()[1].diagonal(dim1=-2, dim2=-1), self.num_kv_heads).sum(-1)  # [L, H]
        logits = self.queries / self.asked / self.rope.head_dim * KEY_WEIGHT * values[..., None, None]
        keys = torch.stack([torch.block_diag(*heads) for heads in logits])  # type: ignore[no-untyped-call]
        plain = torch.eye(keys.shape[-1]).expand_as(keys)
        metric = torch.stack((keys.float(), plain))
        return metric / values.sum(-1).clamp_min(1e-12)[:, None, None]
