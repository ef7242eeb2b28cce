"""How far a layer's attention output moves when its cache is replaced by a smaller one.

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``Hq`` query heads, ``T`` tokens, ``K`` kept tokens, ``N`` continuation
tokens, ``D = H * head_dim``.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvdata.edits.rope import Rope
from kvdata.edits.selection import split_heads


class Inputs(Protocol):
    """As `kvdata.engines.huggingface.AttentionInputs`: a continuation's queries, keys and values behind T tokens."""

    @property
    def queries(self) -> Tensor: ...
    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def scale(self) -> float | None: ...


class AttentionError:
    """Compares caches ``[2, L, K, D]`` with a full one ``[2, L, T, D]`` under the full cache's own queries.

    Each layer's error is ``|o' - o| / |o|`` (Frobenius norm over query heads, continuation tokens and head size), with
    the continuation's own keys and values behind either cache; the result is the mean over layers.
    """

    def __init__(self, kv: Tensor, inputs: Inputs, rope: Rope) -> None:
        self.inputs, self.rope, self.tokens = inputs, rope, kv.shape[2]
        self._reference = self._output(kv)

    def __call__(self, kv: Tensor) -> float:
        """The mean relative error of a cache whose keys are at positions ``0 .. K-1``."""
        moved = (self._output(kv) - self._reference).flatten(1).norm(dim=1)
        return float((moved / self._reference.flatten(1).norm(dim=1)).mean())

    def _output(self, kv: Tensor) -> Tensor:
        """``[L, Hq, N, head_dim]``."""
        keys, values = split_heads(kv, self.inputs.keys.shape[1]).transpose(2, 3).float()  # [L, H, K, head_dim]
        # Only distances count: moving the keys up to the queries' positions equals moving queries and tail down.
        keys = self.rope.rerotate(keys, 0, self.tokens - kv.shape[2])
        count = self.inputs.queries.shape[2]
        mask = torch.ones(count, kv.shape[2] + count, dtype=torch.bool).tril(kv.shape[2])
        found: Tensor = torch.nn.functional.scaled_dot_product_attention(
            self.inputs.queries,
            torch.cat((keys, self.inputs.keys), dim=2),
            torch.cat((values, self.inputs.values), dim=2),
            attn_mask=mask,
            scale=self.inputs.scale,
            enable_gqa=True,
        )
        return found
