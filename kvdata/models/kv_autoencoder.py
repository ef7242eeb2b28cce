"""A linear autoencoder of the cache: fewer and shorter numbers per token, the same tokens.

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``T`` tokens, ``D = H * head_dim``, ``B`` batch.

Per layer, one code for the keys and one for the values of a token, all heads together; keys without their rotation,
since a rotated key fills many more dimensions. It starts as the best linear code under an error metric
(`kvdata.models.low_rank`) and is trained on the attention's output (``training/autoencoder.py``). What comes out is a
cache of the old size, rotated again: the saving is what `encode` returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvdata.edits.quantization import Quantized, dequantize, fake_quantize, quantize
from kvdata.edits.rope import Rope
from kvdata.edits.selection import split_heads
from kvdata.errors import GeometryMismatch
from kvdata.models.files import SavedModule
from kvdata.models.low_rank import GROUP, Basis, latent_bytes


@dataclass(frozen=True)
class Latents:
    """What is kept of caches ``[B, 2, L, T, D]``.

    Attributes:
        parts: float16 ``[B, T', n]`` or integers for each block of equal precision, K before V, layer by layer.
        exact: ``[B, 2, L, T - T', D]``, the first and last tokens as they were.
        length: T.
    """

    parts: list[Tensor | Quantized] = field(repr=False)
    exact: Tensor = field(repr=False)
    length: int

    @property
    def nbytes(self) -> int:
        """What it takes to keep it, scales and exact tokens included."""
        return sum(part.nbytes for part in self.parts) + self.exact.nbytes


class KVAutoencoder(SavedModule):
    """Encodes and decodes caches: ``[B, 2, L, T, D] -> [B, 2, L, T, D]``.

    Until `initialise` it keeps nothing but the exact tokens.

    Args:
        num_layers, num_kv_heads, head_dim: geometry of the cache.
        rope: the model's rotary embedding.
        sinks, window: first and last tokens that are kept exactly.
        group: coordinates that share the scale of their integers.
    """

    kind: ClassVar[str] = "KV autoencoder"
    version: ClassVar[int] = 1

    analysis: Tensor
    synthesis: Tensor
    mean: Tensor
    bits: Tensor
    inv_freq: Tensor

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        rope: Rope,
        sinks: int = 4,
        window: int = 0,
        group: int = GROUP,
    ) -> None:
        super().__init__()
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.sinks, self.window, self.group = sinks, window, group
        self.interleaved = rope.interleaved
        size = num_kv_heads * head_dim
        eye = torch.eye(size).repeat(2, num_layers, 1, 1)
        # The weights act on the coordinates of a basis, where all have variance one: one step size fits them all.
        self.encoder, self.decoder = nn.Parameter(eye.clone()), nn.Parameter(eye.clone())
        self.register_buffer("analysis", eye.clone())
        self.register_buffer("synthesis", eye.clone())
        self.register_buffer("mean", torch.zeros(2, num_layers, size))
        self.register_buffer("bits", torch.zeros(2, num_layers, size, dtype=torch.int64))
        self.register_buffer("inv_freq", rope.inv_freq.clone())

    @torch.no_grad()
    def initialise(self, basis: Basis, mean: Tensor, bits: Tensor) -> None:
        """Start from the best linear code.

        Args:
            basis: of un-rotated keys and of values, leading axes ``[2, L]``.
            mean: of both, ``[2, L, D]``.
            bits: int ``[2, L, D]``: 16, 8, 4 or 0 bits for each latent coordinate, falling along D
                (`kvdata.models.low_rank.water_fill`).
        """
        self.analysis.copy_(basis.analysis)
        self.synthesis.copy_(basis.synthesis)
        self.mean.copy_(mean)
        self.bits.copy_(bits)
        for weight in (self.encoder, self.decoder):
            weight.copy_(torch.eye(weight.shape[2]).expand_as(weight))

    def forward(self, kv: Tensor) -> Tensor:
        """What is left of caches ``[B, 2, L, T, D]`` after encoding and decoding, in their dtype.

        Gradients pass through the rounding as if it were not there.

        Raises:
            GeometryMismatch: the caches are those of another model.
        """
        decoded = [
            self._decode(code, [self._rounded(block, bits) for bits, block in self._blocks(code, rows)])
            for code, rows in enumerate(self.coded(kv).flatten(0, 1))
        ]
        return self._assemble(decoded, self._exact(kv), kv.shape[3])

    @torch.no_grad()
    def encode(self, kv: Tensor) -> Latents:
        """Caches ``[B, 2, L, T, D]`` as the numbers to keep; `decode` makes of them what `forward` returns."""
        parts = [
            block.half() if bits == 16 else quantize(block, bits, self.group)
            for code, rows in enumerate(self.coded(kv).flatten(0, 1))
            for bits, block in self._blocks(code, rows)
        ]
        return Latents(parts, self._exact(kv), kv.shape[3])

    @torch.no_grad()
    def decode(self, latents: Latents) -> Tensor:
        """Caches ``[B, 2, L, T, D]``, in the dtype of the exact tokens."""
        parts = iter(latents.parts)
        decoded = []
        for code in range(2 * self.num_layers):
            blocks = [next(parts) for _ in self._precisions(code)]
            decoded.append(self._decode(code, [b.float() if isinstance(b, Tensor) else dequantize(b) for b in blocks]))
        return self._assemble(decoded, latents.exact, latents.length)

    def nbytes(self, length: int) -> int:
        """Bytes of one encoded cache of `length` tokens, the exact tokens at two bytes a number."""
        exact = min(length, self.sinks + self.window)
        return (length - exact) * latent_bytes(self.bits, self.group) + exact * self._token_bytes

    def ratio(self, length: int) -> float:
        """Those bytes over the whole cache's, at two bytes a number."""
        return self.nbytes(length) / (length * self._token_bytes)

    def token_budget(self, ratio: float, length: int) -> int:
        """Bytes left for the latents of one token, so that a cache of `length` tokens takes `ratio` of its bytes."""
        exact = min(length, self.sinks + self.window)
        return int((ratio * length - exact) * self._token_bytes / max(1, length - exact))

    def geometry(self) -> dict[str, Any]:
        """Arguments of the constructor, as plain values."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "interleaved": self.interleaved,
            "sinks": self.sinks,
            "window": self.window,
            "group": self.group,
        }

    def coded(self, kv: Tensor) -> Tensor:
        """What is coded of caches: un-rotated keys, and values, ``[2, L, B, T', D]``, without the exact tokens.

        Raises:
            GeometryMismatch: the caches are those of another model.
        """
        self._check(kv)
        layered = kv.float().permute(1, 2, 0, 3, 4)
        plain = torch.stack((self._rotate(layered[0], undo=True), layered[1]))
        return plain[..., self._inner(kv.shape[3]), :]

    @property
    def _token_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2

    def _check(self, kv: Tensor) -> None:
        size = self.num_kv_heads * self.head_dim
        if kv.dim() != 5 or kv.shape[1:3] != (2, self.num_layers) or kv.shape[4] != size:
            raise GeometryMismatch(f"the autoencoder takes [B, 2, {self.num_layers}, T, {size}], got {tuple(kv.shape)}")

    def _inner(self, length: int) -> slice:
        """The tokens that are not kept exactly."""
        return slice(min(self.sinks, length), max(length - self.window, self.sinks))

    def _exact(self, kv: Tensor) -> Tensor:
        inner = self._inner(kv.shape[3])
        return torch.cat((kv[..., : inner.start, :], kv[..., inner.stop :, :]), dim=3)

    def _precisions(self, code: int) -> list[tuple[int, int]]:
        """``(bits, coordinates)`` of a code's blocks, none of them empty."""
        row = self._of(self.bits, code).tolist()
        return [(bits, row.count(bits)) for bits in (16, 8, 4) if bits in row]

    def _blocks(self, code: int, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The latents of a code, block by block of equal precision."""
        precisions = self._precisions(code)
        counts = [count for _, count in precisions]
        encoder = self._of(self.analysis, code) @ self._of(self.encoder, code)[:, : sum(counts)]
        latents = (rows - self._of(self.mean, code)) @ encoder
        for (bits, _), block in zip(precisions, torch.split(latents, counts, dim=-1), strict=True):
            yield bits, block

    def _rounded(self, block: Tensor, bits: int) -> Tensor:
        if bits == 16:
            return block + (block.half().float() - block).detach()
        return fake_quantize(block, bits, self.group)

    def _decode(self, code: int, blocks: list[Tensor]) -> Tensor:
        mean = self._of(self.mean, code)
        if not blocks:
            return mean
        latents = torch.cat(blocks, dim=-1)
        decoder = self._of(self.decoder, code)[: latents.shape[-1]] @ self._of(self.synthesis, code)
        return latents @ decoder + mean

    def _of(self, stacked: Tensor, code: int) -> Tensor:
        return stacked[code // self.num_layers, code % self.num_layers]

    def _assemble(self, decoded: list[Tensor], exact: Tensor, length: int) -> Tensor:
        """``[B, T', D]`` of every code, and the exact tokens -> the cache, its keys rotated."""
        inner = self._inner(length)
        batch = exact.shape[0]
        rows = torch.stack([d.expand(batch, inner.stop - inner.start, -1) for d in decoded])
        keys, values = rows.view(2, self.num_layers, *rows.shape[1:])
        plain = torch.stack((self._rotate(keys, start=inner.start), values))
        first, last = exact[..., : inner.start, :], exact[..., inner.start :, :]
        return torch.cat((first, plain.permute(2, 0, 1, 3, 4).to(exact.dtype), last), dim=3)

    def _rotate(self, keys: Tensor, start: int = 0, undo: bool = False) -> Tensor:
        """Keys ``[L, B, T, D]`` at positions ``start ..`` with their rotation put on, or taken off."""
        rope = Rope(self.inv_freq, self.head_dim, self.interleaved)
        at = torch.arange(start, start + keys.shape[2], device=keys.device)[:, None]  # the same for all heads
        old, new = (at, 0) if undo else (0, at)
        return rope.rerotate(split_heads(keys, self.num_kv_heads), old, new).flatten(-2)
