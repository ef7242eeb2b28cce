"""Which tokens of a cache are kept, and the cache that remains.

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``T`` tokens, ``K`` kept tokens, ``D = H * head_dim``. Each
layer and head may keep other tokens in slot ``j``, as long as all keep the same number ``K``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdata.edits.rope import Rope
from kvdata.errors import GeometryMismatch, InvalidRequest


def select(scores: Tensor, keep: int, sinks: int = 4, window: int = 32, per_head: bool = True) -> Tensor:
    """The `keep` tokens of highest score in every layer and head, sinks and window always among them.

    Args:
        scores: ``[L, H, T]``, higher is more worth keeping.
        keep: number of tokens kept, ``sinks + window <= keep <= T``.
        sinks: first tokens, which attract attention whatever they say (StreamingLLM, arXiv 2309.17453).
        window: last tokens, which the next ones read most.
        per_head: False keeps one token set everywhere, by the mean of the per-head *ranks*: the scales of
            scores differ between layers and heads.

    Returns:
        int64 ``[L, H, keep]``, sorted along the last axis.

    Raises:
        InvalidRequest: `keep` does not fit the tokens, the sinks and the window, or a score is NaN.
    """
    length = scores.shape[-1]
    if not 1 <= keep <= length:
        raise InvalidRequest(f"cannot keep {keep} of {length} tokens")
    if sinks < 0 or window < 0 or sinks + window > keep:
        raise InvalidRequest(f"keep={keep} has no room for {sinks} sinks and a window of {window} tokens")
    if scores.isnan().any():
        raise InvalidRequest("token scores contain NaN")
    ranked = scores.float().clone()
    if not per_head:
        ranked[:] = ranked.argsort(dim=-1).argsort(dim=-1).float().mean(dim=(0, 1))
    ranked[..., :sinks] = torch.inf
    ranked[..., length - window :] = torch.inf
    # A stable sort, so that ties (as in one set for all heads) fall alike in every head.
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :keep].sort(dim=-1).values


def split_heads(x: Tensor, num_kv_heads: int) -> Tensor:
    """``[..., D]`` -> view ``[..., H, head_dim]``."""
    return x.reshape(*x.shape[:-1], num_kv_heads, x.shape[-1] // num_kv_heads)


def gather(kv: Tensor, kept: Tensor) -> Tensor:
    """``[2, L, T, D]`` and indices ``[L, H, K]`` -> ``[2, L, K, D]``; keys keep their original rotation."""
    layers, heads = kept.shape[:2]
    if kv.dim() != 4 or kv.shape[0] != 2 or kv.shape[1] != layers or kv.shape[3] % heads:
        raise GeometryMismatch(f"kept {tuple(kept.shape)} does not fit a cache of shape {tuple(kv.shape)}")
    by_head = split_heads(kv, heads)
    index = kept.transpose(1, 2)[None, ..., None].expand(2, -1, -1, -1, by_head.shape[-1])
    return by_head.gather(2, index).flatten(-2)


def relocate(kept_kv: Tensor, kept: Tensor, rope: Rope) -> Tensor:
    """Move the keys of entries ``[2, L, K, D]`` from positions `kept` ``[L, H, K]`` to ``0 .. K-1``, in place."""
    keys = split_heads(kept_kv[0], kept.shape[1]).transpose(1, 2)  # [L, H, K, head_dim]
    slots = torch.arange(kept.shape[2], device=kept.device)
    kept_kv[0] = rope.rerotate(keys, kept, slots).transpose(1, 2).flatten(-2)
    return kept_kv


def compact(kv: Tensor, kept: Tensor, rope: Rope) -> Tensor:
    """Gather per layer and head, and move the kept keys to positions ``0 .. K-1``: ``[2, L, K, D]``."""
    return relocate(gather(kv, kept), kept, rope)
