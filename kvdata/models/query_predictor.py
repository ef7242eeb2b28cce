"""The queries of a prefix, from its cache alone.

Axes: ``B`` batch, ``2`` K/V, ``L`` layers, ``H`` KV heads, ``Hq`` query heads, ``T`` tokens, ``S`` chosen tokens,
``D = H * head_dim``, ``F = 2 * D`` features.

Within one layer K, V and Q are linear images of the same normalised hidden state, so K and V tell most of Q: on
SmolLM2-135M (384 numbers of K and V for 576 hidden dims) a linear map explains 90 % of the queries' variance on
documents it was not fitted to. What attention those queries pay is then a function of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kvdata.edits.rope import Rope
from kvdata.edits.selection import split_heads
from kvdata.edits.solving import solve_definite
from kvdata.errors import GeometryMismatch, InvalidRequest

RIDGE = 1e-3


class QueryPredictor(nn.Module):
    """One linear map per layer from un-rotated keys and values to un-rotated queries, fitted in closed form.

    Args:
        num_layers, num_kv_heads, num_query_heads, head_dim: geometry of the model's attention.
        rope: the model's rotary embedding.
    """

    weight: Tensor
    fitted: Tensor

    def __init__(self, num_layers: int, num_kv_heads: int, num_query_heads: int, head_dim: int, rope: Rope) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim, self.rope = num_kv_heads, head_dim, rope
        features = 2 * num_kv_heads * head_dim + 1
        self.register_buffer("weight", torch.zeros(num_layers, features, num_query_heads * head_dim))
        self.register_buffer("fitted", torch.tensor(False))

    def forward(self, kv: Tensor, tokens: Tensor) -> Tensor:
        """Predicted queries of the S tokens at the given indices: ``[B, 2, L, T, D] -> [L, B, Hq, S, head_dim]``."""
        found = torch.einsum("lbsf,lfq->lbsq", self._features(kv, tokens), self.weight)
        return split_heads(found, found.shape[-1] // self.head_dim).transpose(2, 3)

    @torch.no_grad()
    def fit(self, samples: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Least squares with a small ridge over caches ``[2, L, T, D]`` and their queries ``[L, Hq, T, head_dim]``.

        Raises:
            InvalidRequest: no samples.
            GeometryMismatch: queries of another shape than the cache's.
        """
        gram: Tensor | float = 0.0
        moment: Tensor | float = 0.0
        for kv, queries in samples:
            wanted = queries.float().transpose(1, 2).flatten(2)
            if wanted.shape != (self.weight.shape[0], kv.shape[2], self.weight.shape[2]):
                raise GeometryMismatch(f"queries {tuple(queries.shape)} do not fit the cache {tuple(kv.shape)}")
            known = self._features(kv.unsqueeze(0), torch.arange(kv.shape[2], device=kv.device))[:, 0]
            gram = gram + known.transpose(1, 2) @ known
            moment = moment + known.transpose(1, 2) @ wanted
        if not isinstance(gram, Tensor) or not isinstance(moment, Tensor):
            raise InvalidRequest("fitting the query predictor needs at least one cache")
        scale = gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        eye = torch.eye(gram.shape[1], device=gram.device)
        # In float64, since the ridge is small beside the largest directions.
        self.weight.copy_(solve_definite((gram + RIDGE * scale * eye).double(), moment.double()))
        self.fitted.fill_(True)

    def _features(self, kv: Tensor, tokens: Tensor) -> Tensor:
        """``[L, B, S, F + 1]``: keys without their rotation, values, and a one for the bias."""
        keys, values = split_heads(kv.permute(1, 2, 0, 3, 4).index_select(3, tokens).float(), self.num_kv_heads)
        plain = self.rope.rerotate(keys, tokens[:, None], 0)
        return torch.cat((plain.flatten(-2), values.flatten(-2), plain.new_ones(*plain.shape[:3], 1)), dim=-1)
