"""What attention tells about tokens before anybody asks: statistics of queries over the keys of a prefix.

Axes: ``B`` batch, ``L`` layers, ``H`` KV heads, ``Hq = H * G`` query heads, ``T`` tokens, ``N`` queries.

Queries come from the cache itself (`QueryPredictor`). Some stay where they were asked: how much attention a token has
received so far (as H2O, arXiv 2306.14048) and from the last window (as SnapKV, arXiv 2404.14469). Others are moved
behind the prefix, as samples of what will be asked next (as ExpectedAttention, arXiv 2510.00636, without its Gaussian).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvdata.edits.rope import Rope
from kvdata.edits.selection import split_heads
from kvdata.models.query_predictor import QueryPredictor

SIGNALS = (
    "received mean",
    "received max",
    "window mean",
    "half window mean",
    "future mean",
    "future max",
    "future rms",
    "future of window mean",
    "future of window max",
)
STRIDE, WINDOW, HORIZON = 8, 64, 128
FLOOR = 1e-8


def attention_signals(kv: Tensor, predictor: QueryPredictor, rope: Rope, num_kv_heads: int) -> Tensor:
    """The logarithms of `SIGNALS`: ``[B, 2, L, T, D] -> [L, B, H, T, 9]``."""
    length = kv.shape[3]
    sampled = torch.arange(min(STRIDE // 2, length - 1), length, STRIDE, device=kv.device)
    window = torch.arange(max(0, length - WINDOW), length, device=kv.device)
    asked = predictor(kv, torch.cat((sampled, window)))  # [L, B, Hq, N, head_dim]
    own = rope.rerotate(asked, 0, torch.cat((sampled, window)))
    moved = rope.rerotate(asked, 0, length + torch.cat((_scattered(len(sampled)), _spread(len(window)))).to(kv.device))
    keys = split_heads(kv[:, 0].transpose(0, 1).float(), num_kv_heads).transpose(2, 3)  # [L, B, H, T, head_dim]
    layers = [
        torch.stack([*_past(q, k, sampled, window), *_future(m, k, len(sampled))], dim=-1)
        for q, m, k in zip(own, moved, keys, strict=True)
    ]
    return torch.stack(layers).clamp_min(FLOOR).log()


def smoothed(signals: Tensor, size: int) -> Tensor:
    """Signals averaged (not their logarithms) over `size` neighbouring tokens: ``[..., T, C] -> [..., T, C]``."""
    flat = signals.exp().flatten(0, -3).transpose(1, 2)
    pooled = torch.nn.functional.avg_pool1d(flat, size, stride=1, padding=size // 2, count_include_pad=False)
    return pooled.transpose(1, 2).log().view_as(signals)


def _past(queries: Tensor, keys: Tensor, sampled: Tensor, window: Tensor) -> Iterator[Tensor]:
    """Attention that tokens received where it was asked, over the queries that saw them: four of ``[B, H, T]``."""
    split = len(sampled)
    everywhere = _attention(queries[:, :, :split], keys, sampled)
    yield _mean_of_seen(everywhere, sampled)
    yield everywhere.amax(dim=3).mean(dim=2)
    last = _attention(queries[:, :, split:], keys, window)
    yield _mean_of_seen(last, window)
    yield last[:, :, :, -(len(window) // 2 or 1) :].mean(dim=(2, 3))


def _future(queries: Tensor, keys: Tensor, split: int) -> Iterator[Tensor]:
    """Attention that the same queries would pay from behind the prefix: five of ``[B, H, T]``."""
    any_of, last = (_attention(part, keys) for part in (queries[:, :, :split], queries[:, :, split:]))
    yield any_of.mean(dim=(2, 3))
    yield any_of.amax(dim=3).mean(dim=2)
    yield any_of.square().mean(dim=3).sqrt().mean(dim=2)
    yield last.mean(dim=(2, 3))
    yield last.amax(dim=3).mean(dim=2)


def _attention(queries: Tensor, keys: Tensor, positions: Tensor | None = None) -> Tensor:
    """``[B, Hq, N, head_dim]`` and ``[B, H, T, head_dim]`` -> ``[B, H, G, N, T]``; causal where positions are given."""
    batch, heads = keys.shape[:2]
    grouped = queries.reshape(batch, heads, -1, *queries.shape[2:])
    logits: Tensor = grouped @ keys[:, :, None].transpose(-1, -2) / keys.shape[-1] ** 0.5
    if positions is not None:
        places = torch.arange(keys.shape[2], device=keys.device)
        logits = logits.masked_fill(places > positions[:, None], -torch.inf)
    return logits.softmax(dim=-1)


def _mean_of_seen(attention: Tensor, positions: Tensor) -> Tensor:
    """Mean over the queries at or behind each token, then over the group: ``[B, H, G, N, T] -> [B, H, T]``."""
    places = torch.arange(attention.shape[-1], device=attention.device)
    seen = (positions[:, None] >= places).sum(dim=0).clamp_min(1)
    return (attention.sum(dim=3) / seen).mean(dim=2)


def _scattered(count: int) -> Tensor:
    """Distances behind the prefix, in an order that has nothing to do with where the queries were asked."""
    return torch.arange(count) * 47 % HORIZON  # 47 and HORIZON have no common divisor


def _spread(count: int) -> Tensor:
    return torch.arange(count) * HORIZON // max(count, 1)
