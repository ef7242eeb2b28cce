"""A learned token scorer: which tokens of a cache will the future attend to?

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``T`` tokens, ``S`` scored tokens, ``D = H * head_dim``,
``B`` batch, ``F`` features, ``W`` hidden width.

One two-layer perceptron per layer reads a token's keys and values *of all heads* (together they span much of
the hidden state behind them) and scores the token for each KV head. It is trained with
`kvdata.models.losses.scorer_loss` on the attention of real continuations; the recipe is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvdata.edits.rope import Rope
from kvdata.edits.selection import split_heads
from kvdata.errors import GeometryMismatch, InvalidRequest

FORMAT_VERSION = 2


class TokenScorer(nn.Module):
    """Scores tokens from the cache alone: ``[B, 2, L, T, D] -> [B, L, H, T]``, higher is worth keeping.

    Features per layer and token: keys without their rotation (content), keys rotated relative to the end of
    the prefix (what a query that comes next would meet), values, log norms of keys and values, cosine of each key
    to the mean key (as KeyDiff, arXiv 2504.15364) and the position from both ends.

    Args:
        num_layers, num_kv_heads, head_dim: geometry of the cache.
        rope: the model's rotary embedding.
        width: hidden units per layer.
        dropout: on the hidden units, in training.
    """

    mean: Tensor
    std: Tensor
    inv_freq: Tensor
    calibrated: Tensor

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        rope: Rope,
        width: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.width = width
        self.interleaved = rope.interleaved
        features = 3 * num_kv_heads * head_dim + 3 * num_kv_heads + 3
        self.weight1 = nn.Parameter(torch.randn(num_layers, features, width) / features**0.5)
        self.bias1 = nn.Parameter(torch.zeros(num_layers, 1, width))
        # Small at first, so that training starts from an almost uniform distribution over tokens.
        self.weight2 = nn.Parameter(0.3 * torch.randn(num_layers, width, num_kv_heads) / width**0.5)
        self.bias2 = nn.Parameter(torch.zeros(num_layers, 1, num_kv_heads))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("inv_freq", rope.inv_freq.clone())
        self.register_buffer("mean", torch.zeros(num_layers, 1, features))
        self.register_buffer("std", torch.ones(num_layers, 1, features))
        self.register_buffer("calibrated", torch.tensor(False))

    def forward(self, kv: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Scores of all tokens ``[B, L, H, T]``, or of the S given token indices only ``[B, L, H, S]``.

        The first forward in training mode takes the features' mean and deviation from its batch.

        Raises:
            GeometryMismatch: the cache is that of another model.
        """
        self._check(kv)
        features = self._features(kv, tokens)
        if self.training and not self.calibrated:
            self._calibrate(features)
        # Standardising is folded into the weights: the features are by far the largest tensor here.
        weight = self.weight1 / self.std.transpose(1, 2)
        bias = self.bias1 - self.mean @ weight
        flat = features.flatten(1, 2)  # [L, B * S, F]
        hidden = torch.baddbmm(bias.to(flat.dtype), flat, weight.to(flat.dtype)).float()
        hidden = self.dropout(nn.functional.gelu(hidden))
        scores = torch.baddbmm(self.bias2, hidden, self.weight2)
        batch, scored = features.shape[1:3]
        return scores.view(self.num_layers, batch, scored, self.num_kv_heads).permute(1, 0, 3, 2)

    @torch.no_grad()
    def calibrate(self, kv: Tensor) -> None:
        """Take mean and deviation of each feature from a few samples ``[B, 2, L, T, D]``."""
        self._check(kv)
        self._calibrate(self._features(kv, None))

    def save(self, path: str | Path) -> None:
        """Write geometry and weights to one file that `load` reads."""
        config = {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "width": self.width,
            "interleaved": self.interleaved,
            "dropout": self.dropout.p,
        }
        torch.save({"version": FORMAT_VERSION, "config": config, "state": self.state_dict()}, path)

    @classmethod
    def load(cls, path: str | Path) -> TokenScorer:
        """A scorer from `save`, on the CPU in eval mode; nothing but tensors and plain values is unpickled.

        Raises:
            InvalidRequest: the file is of another kind or version.
        """
        data: Any = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(data, dict) or data.get("version") != FORMAT_VERSION:
            raise InvalidRequest(f"{path} is not a token scorer of version {FORMAT_VERSION}; train and save it again")
        config, state = data["config"], data["state"]
        rope = Rope(state["inv_freq"], config["head_dim"], config.pop("interleaved"))
        scorer = cls(rope=rope, **config)
        scorer.load_state_dict(state)
        return scorer.eval()

    def _check(self, kv: Tensor) -> None:
        hidden = self.num_kv_heads * self.head_dim
        if kv.dim() != 5 or kv.shape[1:3] != (2, self.num_layers) or kv.shape[4] != hidden:
            raise GeometryMismatch(f"the scorer takes [B, 2, {self.num_layers}, T, {hidden}], got {tuple(kv.shape)}")

    def _features(self, kv: Tensor, tokens: Tensor | None) -> Tensor:
        """``[L, B, S, F]`` in the dtype of the matrix product."""
        length = kv.shape[3]
        positions = torch.arange(length, device=kv.device) if tokens is None else tokens
        layered = kv.permute(1, 2, 0, 3, 4)  # [2, L, B, T, D]
        mean_key = split_heads(layered[0].mean(dim=2, keepdim=True, dtype=torch.float32), self.num_kv_heads)
        chosen = layered if tokens is None else layered.index_select(3, tokens)
        keys, values = split_heads(chosen, self.num_kv_heads)  # [L, B, S, H, head_dim]
        rope = Rope(self.inv_freq, self.head_dim, self.interleaved)
        at = positions[:, None]  # one position for all heads of a token
        parts = [
            rope.rerotate(keys, at, 0),
            rope.rerotate(keys, length, 0),
            values,
        ]
        statistics = torch.cat(
            (
                _log_norm(keys),
                torch.cosine_similarity(keys.float(), mean_key, dim=-1),
                _log_norm(values),
                _places(positions, length).expand(*keys.shape[:3], -1),
            ),
            dim=-1,
        )
        dtype = _product_dtype(kv)
        return torch.cat([*(part.flatten(-2).to(dtype) for part in parts), statistics.to(dtype)], dim=-1)

    @torch.no_grad()
    def _calibrate(self, features: Tensor) -> None:
        flat = features.float().flatten(1, 2)
        self.mean.copy_(flat.mean(dim=1, keepdim=True))
        # A feature that never varies in the batch must not explode later.
        self.std.copy_(flat.std(dim=1, keepdim=True).clamp_min(1e-2))
        self.calibrated.fill_(True)


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
