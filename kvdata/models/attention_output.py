"""What later queries read from a cache, and how far that moves when the cache is compressed.

Axes: ``B`` batch, ``2`` K/V, ``L`` layers, ``H`` KV heads, ``Hq`` query heads, ``T`` tokens, ``N`` queries,
``D = H * head_dim``.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvdata.edits.selection import split_heads


def attention_output_error(found: Tensor, reference: Tensor, queries: Tensor) -> Tensor:
    """How far the attention's output moves: squared error over squared output, ``[L]``, over all heads and queries.

    Only the prefix is attended to. Sinks that both caches share keep a common shift of all logits from going unseen.

    Args:
        found, reference: ``[B, 2, L, T, D]``, keys rotated.
        queries: ``[B, L, Hq, N, head_dim]``, rotated.
    """
    wanted = attention_output(reference, queries)
    error = (attention_output(found, queries) - wanted).square().sum((0, 2, 3, 4))
    return error / wanted.square().sum((0, 2, 3, 4)).clamp_min(1e-12)


def attention_output(kv: Tensor, queries: Tensor) -> Tensor:
    """What queries ``[B, L, Hq, N, head_dim]`` read from caches ``[B, 2, L, T, D]``: ``[B, L, Hq, N, head_dim]``."""
    heads = kv.shape[-1] // queries.shape[-1]
    keys, values = split_heads(kv.to(queries.dtype), heads).transpose(-2, -3).unbind(1)  # [B, L, H, T, head_dim]
    read = scaled_dot_product_attention(
        queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), enable_gqa=True
    )
    return read.view(queries.shape)
