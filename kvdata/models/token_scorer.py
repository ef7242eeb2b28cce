"""A learned token scorer: which tokens of a cache will the future attend to?

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``T`` tokens, ``S`` scored tokens, ``D = H * head_dim``,
``B`` batch, ``F`` features, ``C`` signals, ``W`` hidden width.

It reads K and V alone. From them it predicts the queries that were asked over the prefix (`QueryPredictor`) and what
attention those pay to each token (`attention_signals`); a token's score for a KV head starts as the mean of three of
these signals, and one two-layer perceptron per layer, over the signals, the keys and values of *all* heads and what
repeats what (`repetition`), learns what they miss. It is trained with `kvdata.models.losses.scorer_loss` on the
attention of real continuations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvdata.edits.rope import Rope
from kvdata.edits.selection import split_heads
from kvdata.errors import GeometryMismatch
from kvdata.models.attention_signals import SIGNALS, attention_signals, smoothed
from kvdata.models.files import SavedModule
from kvdata.models.query_predictor import QueryPredictor
from kvdata.models.repetition import FEATURES as REPETITIONS
from kvdata.models.repetition import repetition

SMOOTHING = (5, 21)  # tokens; one beside a needed token is often needed too
STARTING_SIGNALS = ("received mean", "future mean", "future of window mean")


class TokenScorer(SavedModule):
    """Scores tokens from the cache alone: ``[B, 2, L, T, D] -> [B, L, H, T]``, higher is worth keeping.

    Features per layer and token: keys without their rotation (content), keys rotated relative to the end of
    the prefix (what a query that comes next would meet), values, log norms of keys and values, cosine of each key
    to the mean key (as KeyDiff, arXiv 2504.15364), the position from both ends, how the token repeats others, and the
    attention signals.

    Args:
        num_layers, num_kv_heads, num_query_heads, head_dim: geometry of the model's attention.
        rope: the model's rotary embedding.
        width: hidden units per layer.
        dropout: on the hidden units, in training.
    """

    kind: ClassVar[str] = "token scorer"
    version: ClassVar[int] = 4

    mean: Tensor
    std: Tensor
    inv_freq: Tensor
    calibrated: Tensor

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        num_query_heads: int,
        head_dim: int,
        rope: Rope,
        width: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.num_layers, self.num_kv_heads, self.num_query_heads = num_layers, num_kv_heads, num_query_heads
        self.head_dim, self.width, self.interleaved = head_dim, width, rope.interleaved
        signals = len(SIGNALS) * (1 + len(SMOOTHING))
        features = 3 * num_kv_heads * head_dim + (3 + signals) * num_kv_heads + 3 + REPETITIONS
        self.queries = QueryPredictor(num_layers, num_kv_heads, num_query_heads, head_dim, rope)
        self.weight1 = nn.Parameter(torch.randn(num_layers, features, width) / features**0.5)
        self.bias1 = nn.Parameter(torch.zeros(num_layers, 1, width))
        # Small at first, so that training starts from the signals.
        self.weight2 = nn.Parameter(0.1 * torch.randn(num_layers, width, num_kv_heads) / width**0.5)
        self.direct = nn.Parameter(_starting_weights(num_layers, num_kv_heads, signals))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("inv_freq", rope.inv_freq.clone())
        self.register_buffer("mean", torch.zeros(num_layers, 1, features))
        self.register_buffer("std", torch.ones(num_layers, 1, features))
        self.register_buffer("calibrated", torch.tensor(False))

    @property
    def rope(self) -> Rope:
        """The model's rotary embedding."""
        return Rope(self.inv_freq, self.head_dim, self.interleaved)

    def forward(self, kv: Tensor, tokens: Tensor | None = None, signals: Tensor | None = None) -> Tensor:
        """Scores of all tokens ``[B, L, H, T]``, or of the S given token indices only ``[B, L, H, S]``.

        Args:
            signals: what `signals` gave for these caches, where it is kept between epochs.

        Raises:
            GeometryMismatch: the cache is that of another model.
        """
        self._check(kv)
        features, wide = self._features(kv, tokens, self.signals(kv) if signals is None else signals)
        # Standardising is folded into the weights: the features are by far the largest tensor here.
        weight = self.weight1 / self.std.transpose(1, 2)
        bias = self.bias1 - self.mean @ weight
        flat = features.flatten(1, 2)  # [L, B * S, F]
        hidden = torch.baddbmm(bias.to(flat.dtype), flat, weight.to(flat.dtype)).float()
        learned = self.dropout(nn.functional.gelu(hidden)) @ self.weight2
        batch, scored = features.shape[1:3]
        plain = torch.einsum("lbhsc,lhc->blhs", wide, self.direct)
        scores: Tensor = plain + learned.view(self.num_layers, batch, scored, self.num_kv_heads).permute(1, 0, 3, 2)
        return scores

    @torch.no_grad()
    def signals(self, kv: Tensor) -> Tensor:
        """The attention signals of caches, ``[L, B, H, T, 9]``; they do not change while the scorer is trained."""
        return attention_signals(kv, self.queries, self.rope, self.num_kv_heads)

    @torch.no_grad()
    def prepare(self, samples: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Fit the query predictor and the scale of the features, before training.

        Args:
            samples: a few caches ``[2, L, T, D]`` with their queries ``[L, Hq, T, head_dim]``; eight of 1,024 tokens
                are enough.
        """
        known = list(samples)
        self.queries.fit(known)
        few = torch.stack([kv for kv, _ in known[:2]])
        flat = self._features(few, None, self.signals(few))[0].float().flatten(1, 2)
        self.mean.copy_(flat.mean(dim=1, keepdim=True))
        # A feature that never varies in the batch must not explode later.
        self.std.copy_(flat.std(dim=1, keepdim=True).clamp_min(1e-2))
        self.calibrated.fill_(True)

    def geometry(self) -> dict[str, Any]:
        """Arguments of the constructor, as plain values."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "num_query_heads": self.num_query_heads,
            "head_dim": self.head_dim,
            "width": self.width,
            "interleaved": self.interleaved,
            "dropout": self.dropout.p,
        }

    def _check(self, kv: Tensor) -> None:
        hidden = self.num_kv_heads * self.head_dim
        if kv.dim() != 5 or kv.shape[1:3] != (2, self.num_layers) or kv.shape[4] != hidden:
            raise GeometryMismatch(f"the scorer takes [B, 2, {self.num_layers}, T, {hidden}], got {tuple(kv.shape)}")

    def _features(self, kv: Tensor, tokens: Tensor | None, signals: Tensor) -> tuple[Tensor, Tensor]:
        """Features ``[L, B, S, F]`` in the dtype of the matrix product, and signals ``[L, B, H, S, 3 C]``."""
        length = kv.shape[3]
        positions = torch.arange(length, device=kv.device) if tokens is None else tokens
        layered = kv.permute(1, 2, 0, 3, 4)  # [2, L, B, T, D]
        mean_key = split_heads(layered[0].mean(dim=2, keepdim=True, dtype=torch.float32), self.num_kv_heads)
        chosen = layered if tokens is None else layered.index_select(3, tokens)
        keys, values = split_heads(chosen, self.num_kv_heads)  # [L, B, S, H, head_dim]
        at = positions[:, None]  # one position for all heads of a token
        parts = [self.rope.rerotate(keys, at, 0), self.rope.rerotate(keys, length, 0), values]
        wide = torch.cat([signals, *(smoothed(signals, size) for size in SMOOTHING)], dim=-1).index_select(3, positions)
        statistics = torch.cat(
            (
                _log_norm(keys),
                torch.cosine_similarity(keys.float(), mean_key, dim=-1),
                _log_norm(values),
                _places(positions, length).expand(*keys.shape[:3], -1),
                repetition(kv).index_select(1, positions).expand(len(keys), -1, -1, -1),
                wide.transpose(2, 3).flatten(-2),
            ),
            dim=-1,
        )
        dtype = _product_dtype(kv)
        return torch.cat([*(part.flatten(-2).to(dtype) for part in parts), statistics.to(dtype)], dim=-1), wide


def _starting_weights(num_layers: int, num_kv_heads: int, signals: int) -> Tensor:
    """The mean of `STARTING_SIGNALS`: without training already as good as SnapKV with the true queries."""
    weights = torch.zeros(num_layers, num_kv_heads, signals)
    for name in STARTING_SIGNALS:
        weights[..., SIGNALS.index(name)] = 1 / len(STARTING_SIGNALS)
    return weights


def _log_norm(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return norms.clamp_min(1e-6).log()


def _places(positions: Tensor, length: int) -> Tensor:
    """``[S, 3]``: log distance from both ends, and the relative position."""
    at = positions.float()
    return torch.stack(((at + 1).log(), (length - at).log(), at / length), dim=-1)


def _product_dtype(kv: Tensor) -> torch.dtype:
    """bfloat16 where the hardware multiplies it (five times as fast on an AMX CPU), else float32."""
    fast = kv.is_cuda or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast and kv.dtype == torch.bfloat16 else torch.float32
