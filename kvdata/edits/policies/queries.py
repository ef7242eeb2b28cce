"""Policies that also see queries: what the model asked over the prefix, or what is asked about it.

Axes: ``L`` layers, ``H`` KV heads, ``G`` query heads that share a KV head, ``Hq = H * G`` query heads, ``T`` tokens,
``N`` queries, ``d`` head_dim.

All work layer by layer: a layer's attention ``[H, G, N, T]`` is the most that exists at a time. Those that observe the
prefix's last queries always keep these tokens, as their papers do, and need a prefix that is longer.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, normalize, pad

from kvdata.edits.policies.base import Policy, Sees, Source, need
from kvdata.edits.rope import Rope
from kvdata.edits.selection import split_heads
from kvdata.errors import GeometryMismatch, InvalidRequest


@dataclass(frozen=True)
class QueryPolicy(Policy):
    """Scores a layer's tokens by the queries that `ask` picks and rotates.

    Args:
        rope: the model's; `Source` holds queries before RoPE.
        scale: factor of the attention logits; default ``1 / sqrt(head_dim)``.
    """

    rope: Rope
    scale: float | None = None

    sees: ClassVar[Sees] = Sees.QUERIES

    def scores(self, kv: Tensor, num_kv_heads: int, source: Source) -> Tensor:
        queries = by_group(self.ask(kv, source), kv, num_kv_heads)
        layers = zip(queries, kv[0], kv[1], strict=True)
        return torch.stack([self.layer_scores(q, heads(k, num_kv_heads), heads(v, num_kv_heads)) for q, k, v in layers])

    @abstractmethod
    def ask(self, kv: Tensor, source: Source) -> Tensor:
        """The queries to score with, rotated: ``[L, Hq, N, d]``, float32."""

    @abstractmethod
    def layer_scores(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``[H, G, N, d]`` and keys and values ``[H, T, d]`` of one layer -> ``[H, T]``."""

    def logits(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What a softmax over tokens makes attention of: ``[H, G, N, d]`` and ``[H, T, d]`` -> ``[H, G, N, T]``."""
        scale = self.scale or keys.shape[-1] ** -0.5
        # One product per KV head: the keys are not repeated for its query heads.
        return (queries.flatten(1, 2) @ keys.mT).view(*queries.shape[:3], -1) * scale

    def last_queries(self, kv: Tensor, source: Source, count: int) -> Tensor:
        """The prefix's last queries at their own positions, ``[L, Hq, count, d]``."""
        length = kv.shape[2]
        if length <= count:
            raise InvalidRequest(f"the {self.name} policy observes {count} tokens; the prefix has only {length}")
        positions = torch.arange(length - count, length, device=kv.device)
        return self.rope.rerotate(prefix_queries(self, kv, source)[:, :, -count:], 0, positions)


@dataclass(frozen=True)
class SnapKV(QueryPolicy):
    """What the prefix's last queries attend to (SnapKV, arXiv 2404.14469; the form of kvpress).

    The mean over the window's causal attention, smoothed along the tokens, mean over each group of query heads.

    Args:
        window: last tokens whose queries are observed.
        kernel: tokens of the average pooling, odd.
    """

    window: int = 64
    kernel: int = 5
    name: str = "snapkv"

    def ask(self, kv: Tensor, source: Source) -> Tensor:
        return self.last_queries(kv, source, self.window)

    def layer_scores(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attention = causal(self.logits(queries, keys)).softmax(-1)
        before = attention.mean(2)[..., : -self.window]  # [H, G, T - window]
        smooth = avg_pool1d(before, self.kernel, stride=1, padding=self.kernel // 2)
        return always_keep(smooth.mean(1), last=self.window)


@dataclass(frozen=True)
class SnapKVQuestion(QueryPolicy):
    """What the queries of a question that follows the prefix attend to: SnapKV with the question as its window.

    The question's attention to itself is unknown here: its softmax is over the prefix alone.

    Args:
        kernel: tokens of the average pooling, odd.
    """

    kernel: int = 5
    name: str = "snapkv-question"
    sees: ClassVar[Sees] = Sees.QUESTION

    def ask(self, kv: Tensor, source: Source) -> Tensor:
        question = need(source.question, self, "question=..., its queries before RoPE [L, Hq, N, head_dim]")
        first = kv.shape[2]
        positions = torch.arange(first, first + question.shape[2], device=kv.device)
        return self.rope.rerotate(question.to(kv.device, torch.float32), 0, positions)

    def layer_scores(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attention = self.logits(queries, keys).softmax(-1).mean(2)
        return avg_pool1d(attention, self.kernel, stride=1, padding=self.kernel // 2).mean(1)


@dataclass(frozen=True)
class TOVA(QueryPolicy):
    """What the last query attends to, mean over all heads of a layer (TOVA, arXiv 2401.06104)."""

    name: str = "tova"

    def ask(self, kv: Tensor, source: Source) -> Tensor:
        return self.last_queries(kv, source, 1)

    def layer_scores(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attention = self.logits(queries, keys).softmax(-1)[..., :-1].mean((0, 1, 2))
        return always_keep(attention.expand(len(keys), -1), last=1)


@dataclass(frozen=True)
class ExpectedAttention(QueryPolicy):
    """The attention to expect from later queries, times the norm of the value (arXiv 2510.00636; kvpress).

    Later queries are taken as normal, with the mean ``m`` and the covariance ``C`` of the prefix's queries, turned by
    the average of the rotations to the next positions. Then ``E exp(q k) = exp(m k + k C k / 2)`` (with the scale in
    ``k``), normalised over the tokens, mean over each group of query heads.

    Args:
        future: number of positions after the prefix over which the rotation is averaged.
        sinks: first tokens, left out of the statistics and always kept.
        epsilon: added to the expected attention, so that values of great norm count even where none is expected.
    """

    future: int = 512
    sinks: int = 4
    epsilon: float = 0.0
    name: str = "expected-attention"

    def ask(self, kv: Tensor, source: Source) -> Tensor:
        length = kv.shape[2]
        if length <= self.sinks:
            raise InvalidRequest(f"the {self.name} policy leaves {self.sinks} sinks out; the prefix has only {length}")
        turn = mean_rotation(self.rope, range(length, length + self.future)).to(kv.device)
        # Turning every query turns their mean and covariance alike.
        return prefix_queries(self, kv, source)[:, :, self.sinks :] @ turn

    def layer_scores(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = keys[:, self.sinks :], values[:, self.sinks :]
        mean = queries.mean(2, keepdim=True)  # [H, G, 1, d]
        centred = queries - mean
        covariance = centred.mT @ centred / queries.shape[2]  # [H, G, d, d]
        scale = self.scale or keys.shape[-1] ** -0.5
        spread = ((keys[:, None] @ covariance) * keys[:, None]).sum(-1) * scale**2
        expected = (self.logits(mean, keys)[:, :, 0] + spread / 2).softmax(-1).mean(1)
        return always_keep((expected + self.epsilon) * values.norm(dim=-1), first=self.sinks)


@dataclass(frozen=True)
class RKV(QueryPolicy):
    """What the last queries attend to and other keys do not already say (R-KV, arXiv 2505.24133).

    ``importance * attention - (1 - importance) * redundancy``. Attention is that of SnapKV with the maximum over each
    group of query heads and max pooling; redundancy is `redundancy` of the keys, a softmax over the tokens.

    Args:
        window: last tokens whose queries are observed.
        kernel: tokens of the max pooling, odd.
        importance: weight of the attention, the paper's lambda.
        threshold: cosine similarity from which on two keys say the same.
    """

    window: int = 8
    kernel: int = 7
    importance: float = 0.1
    threshold: float = 0.5
    name: str = "r-kv"

    def ask(self, kv: Tensor, source: Source) -> Tensor:
        return self.last_queries(kv, source, self.window)

    def layer_scores(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        peak = self.logits(queries, keys).amax(1)[..., : -self.window]  # [H, N, T - window]
        attention = max_pool1d(peak.softmax(-1).mean(1), self.kernel, stride=1, padding=self.kernel // 2)
        copies = redundancy(keys, self.threshold)[:, : -self.window]
        return always_keep(self.importance * attention - (1 - self.importance) * copies, last=self.window)


def prefix_queries(policy: Policy, kv: Tensor, source: Source) -> Tensor:
    """`Source.queries` as float32 where the cache is, ``[L, Hq, T, d]``."""
    queries = need(source.queries, policy, "queries=..., the prefix's own before RoPE [L, Hq, T, head_dim]")
    if queries.dim() != 4 or queries.shape[2] != kv.shape[2]:
        raise GeometryMismatch(f"queries {tuple(queries.shape)} are not [L, Hq, {kv.shape[2]}, head_dim]")
    return queries.to(kv.device, torch.float32)


def by_group(queries: Tensor, kv: Tensor, num_kv_heads: int) -> Tensor:
    """``[L, Hq, N, d]`` -> ``[L, H, G, N, d]``: query head ``h`` reads KV head ``h // G``."""
    layers, width = kv.shape[1], kv.shape[3] // num_kv_heads
    if queries.shape[0] != layers or queries.shape[1] % num_kv_heads or queries.shape[3] != width:
        raise GeometryMismatch(
            f"queries {tuple(queries.shape)} do not fit {layers} layers of {num_kv_heads} KV heads of {width} dims"
        )
    return queries.reshape(layers, num_kv_heads, -1, *queries.shape[2:])


def heads(layer: Tensor, num_kv_heads: int) -> Tensor:
    """``[T, D]`` -> ``[H, T, d]`` in float32."""
    return split_heads(layer.float(), num_kv_heads).transpose(0, 1)


def causal(logits: Tensor) -> Tensor:
    """Logits ``[..., N, T]`` of the last N tokens' queries; they do not see what comes after them."""
    count, length = logits.shape[-2:]
    later = torch.ones(count, length, dtype=torch.bool, device=logits.device).triu(length - count + 1)
    return logits.masked_fill(later, -torch.inf)


def always_keep(scores: Tensor, first: int = 0, last: int = 0) -> Tensor:
    """Tokens added before and after those scored, above all of them: ``[H, n]`` -> ``[H, first + n + last]``."""
    return pad(scores, (first, last), value=float(scores.amax()) + 1)


def mean_rotation(rope: Rope, positions: range) -> Tensor:
    """Mean of the rotations to these positions, for rows ``q @ R``: ``[d, d]``; ``[L, 1, d, d]`` if layers differ."""
    unit = torch.eye(rope.head_dim)
    if rope.inv_freq.dim() == 2:
        unit = unit.expand(len(rope.inv_freq), 1, -1, -1)
    total = torch.zeros_like(unit)
    for position in positions:
        total += rope.rerotate(unit, 0, position)
    return total / len(positions)


def redundancy(keys: Tensor, threshold: float, rows: int = 256) -> Tensor:
    """How much each key repeats the others, ``[H, T, d]`` -> ``[H, T]``, a softmax of mean cosine similarities.

    A key's last similar one (above `threshold`) is not charged with that similarity: of several keys that say the same
    the latest stays. Works on `rows` keys at a time, to not hold all pairs.
    """
    unit = normalize(keys, dim=-1)
    length = keys.shape[1]
    total = torch.zeros_like(unit[..., 0])
    for start in range(0, length, rows):
        part = torch.arange(start, min(start + rows, length), device=keys.device)
        similar = unit[:, part] @ unit.mT  # [H, rows, T]
        similar[:, part - start, part] = 0
        last = length - 1 - (similar > threshold).flip(-1).int().argmax(-1, keepdim=True)  # the end where there is none
        kept = similar.gather(-1, last)
        similar.scatter_(-1, last, torch.where(kept > threshold, 0, kept))
        total += similar.sum(1)
    return (total / length).softmax(-1)
