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
from kvdata.edits.solving import solve_definite

REFERENCES, FUTURE, RIDGE = 512, 128, 0.1
SHIFT_RIDGE = 3e-3  # of `key_shift`, relative to the mean square of the queries


@dataclass(frozen=True)
class ValueRefit:
    """The values' half of attention matching (arXiv 2602.16284), for queries that somebody predicts.

    In place of its bias on the logits, which no engine reads from a cache, the keys of a head are shifted alike.

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
            asked = self.queries(kv.unsqueeze(0), denser_at_the_end(kv.shape[2], self.references).to(kv.device))[:, 0]
        return refit_values(
            kv,
            kept,
            lambda length: asked_later(asked.float(), self.rope, length, self.future),
            self.rope,
            self.ridge,
            keep_mass=True,
        )


def refit_values(
    kv: Tensor,
    kept: Tensor,
    ask: Callable[[int], Tensor],
    rope: Rope,
    ridge: float = RIDGE,
    scale: float | None = None,
    keep_mass: bool = False,
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
        keep_mass: shift the keys, so that all slots together get the attention that all tokens did, see `key_shift`.

    Returns:
        ``[2, L, K, D]``, its keys rotated as in `kv`.
    """
    num_kv_heads, slots = kept.shape[1:]
    merged = gather(kv, kept)
    moved = relocate(merged.clone(), kept, rope)
    before, after = (by_group(ask(length), kv, num_kv_heads).flatten(2, 3) for length in (kv.shape[2], slots))
    shifts = []
    for layer in range(kv.shape[1]):
        keys, values, new_keys, old_values = (heads(part[layer], num_kv_heads) for part in (*kv, *moved))
        asked, found = (_logits(q[layer], k, scale) for q, k in ((before, keys), (after, new_keys)))
        fitted = refit(found.softmax(-1), old_values, asked.softmax(-1) @ values, ridge)
        merged[1, layer] = fitted.transpose(0, 1).flatten(-2)
        if keep_mass:
            shifts.append(key_shift(after[layer], asked.logsumexp(-1) - found.logsumexp(-1), scale))
    if shifts:
        everywhere = torch.stack(shifts)[:, :, None].expand(-1, -1, slots, -1)
        places = torch.arange(slots, device=kept.device)
        # In the geometry of `kv`: `relocate` turns the keys to their slots.
        merged[0] += rope.rerotate(everywhere, places, kept).transpose(1, 2).flatten(-2)
    return merged


def key_shift(queries: Tensor, missing: Tensor, scale: float | None = None) -> Tensor:
    """The vector that, added to all keys of a head, raises each query's logits by what its attention is missing.

    Attention between these keys stays as it was; what comes after them gets its old share. By least squares, since
    there are more queries than dimensions: queries have a large part in common.

    Args:
        queries: ``[H, M, d]``.
        missing: ``[H, M]``, the logarithm of the sum of ``exp(logits)`` that is wanted, less the present one.

    Returns:
        ``[H, d]``.
    """
    scaled = queries * (scale or queries.shape[-1] ** -0.5)
    gram = scaled.mT @ scaled
    weight = (SHIFT_RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)).clamp_min(1e-6)[:, None, None]
    damped = gram + weight * torch.eye(gram.shape[-1], device=gram.device)
    return solve_definite(damped, scaled.mT @ missing[..., None])[..., 0]


def evenly_spaced(tokens: int, references: int) -> Tensor:
    """Indices of the tokens whose queries are asked again, the last one among them."""
    count = min(references, tokens)
    return (torch.arange(count) + 1) * tokens // count - 1


def denser_at_the_end(tokens: int, references: int) -> Tensor:
    """The same, half of them in the last quarter: what was asked last is the most like what will be asked."""
    count = min(references, tokens)
    back = (torch.arange(count).flip(0) / count).square() * tokens
    return tokens - 1 - back.long()


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
    return values + solve_definite(damped, attention.mT @ (target - attention @ values))


def _logits(queries: Tensor, keys: Tensor, scale: float | None) -> Tensor:
    """A row per query of a KV head's group: ``[H, M, d]`` and ``[H, n, d]`` -> ``[H, M, n]``."""
    return queries @ keys.mT * (scale or keys.shape[-1] ** -0.5)
