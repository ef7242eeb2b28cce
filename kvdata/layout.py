"""Geometry of a model's KV cache, and how one stored chunk maps to ``[2, L, T, D]``.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``H`` KV heads, ``S`` head size, ``D = H * S``.

This is the only module that knows byte orders. A packing says how the elements of one stored chunk lie in
memory; each is a set of strides, so decoding and encoding are one copy between views:

* ``split``: ``[2, L, T, H, S]``, one K plane and one V plane.
* ``fused``: ``[L, T, H, 2 * S]``, the K dims of a head followed by its V dims.
* ``vllm-cpu``: what vLLM's CPU backend stores. Its blocks of ``N`` tokens hold, per head, K transposed ``[S, N]``
  followed by V ``[N, S]``; a server takes these ``2 * S * N`` elements for ``N`` rows of ``[K | V]``, and so puts
  element ``p`` of a head's block into row ``p // 2S``, column ``p % 2S`` of a ``fused`` chunk.
* ``vllm-cpu-amx``: the same for bfloat16 on a CPU with AMX, where a head's block holds K as ``[N/16, S/2, 16, 2]``
  (token group, dim pair, token, dim of the pair) and V as ``[S/16, N/2, 16, 2]`` (dim group, token pair, dim, token
  of the pair).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kvdata.errors import GeometryMismatch, InvalidRequest

PACKINGS = ("split", "fused", "vllm-cpu", "vllm-cpu-amx")
DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` or ``"torch.bfloat16"`` -> ``torch.bfloat16``; `InvalidRequest` for any other kind."""
    dtype = DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if dtype is None:
        raise InvalidRequest(f"KV dtype {name!r} is not supported; known: {', '.join(DTYPES)}")
    return dtype


class Part(NamedTuple):
    """Which elements of a stored chunk are meant, as slices of ``[2, L, T, H]``; all of them by default.

    Attributes:
        kinds: K (``0:1``), V (``1:2``), or both.
        layers, tokens, heads: ranges inside the chunk.
    """

    kinds: slice = slice(None)
    layers: slice = slice(None)
    tokens: slice = slice(None)
    heads: slice = slice(None)


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of one model's KV cache and the packing of its stored chunks.

    Args:
        num_layers: decoder layers ``L``.
        num_kv_heads: key/value heads ``H`` (after grouping, not query heads).
        head_dim: size ``S`` of one head.
        dtype: element type of the stored cache.
        packing: ``"split"``, ``"fused"``, ``"vllm-cpu"`` or ``"vllm-cpu-amx"``.
        block_size: tokens in a block of the engine's own cache; only the packings of vLLM's CPU backend need it.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    packing: str = "split"
    block_size: int | None = None

    def __str__(self) -> str:
        shape = f"[2, {self.num_layers}, T, {self.num_kv_heads} x {self.head_dim}]"
        return f"{shape} {dtype_name(self.dtype)}, packing {self.packing}"

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidRequest(f"KVLayout.{field} must be a positive int, got {value!r}")
        if self.packing not in PACKINGS:
            raise InvalidRequest(f"unknown packing {self.packing!r}; known: {', '.join(PACKINGS)}")
        parse_dtype(dtype_name(self.dtype))
        if self.packing not in ("vllm-cpu", "vllm-cpu-amx"):
            object.__setattr__(self, "block_size", None)  # the other packings know no blocks
        else:
            self._check_block_size()

    def _check_block_size(self) -> None:
        block = self.block_size if type(self.block_size) is int and self.block_size > 0 else 0
        if self.packing == "vllm-cpu-amx":
            if self.head_dim % 16 or not block or block % 32 or 8 * block % self.head_dim:
                raise InvalidRequest(
                    f"packing vllm-cpu-amx needs head_dim in steps of 16 and block_size (128 in vLLM) in steps of 32; "
                    f"got {self.head_dim} and {self.block_size!r}"
                )
        else:
            row = 2 * self.head_dim
            if not block or (block % row and row % block) or block % 2:
                raise InvalidRequest(
                    f"packing vllm-cpu needs block_size, the tokens in a block of the engine's cache (128 in vLLM), "
                    f"as a multiple or divisor of {row}; got {self.block_size!r}"
                )

    @property
    def hidden(self) -> int:
        """``D = num_kv_heads * head_dim``."""
        return self.num_kv_heads * self.head_dim

    @property
    def fused(self) -> bool:
        """True when a stored chunk has one plane that holds K and V together."""
        return self.packing != "split"

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.hidden * self.dtype.itemsize

    def chunk_shape(self, tokens: int) -> tuple[int, ...]:
        """Shape in which a chunk of ``tokens`` tokens is stored by an engine-driven client."""
        if self.fused:
            return (self.num_layers, tokens, 2 * self.hidden)
        return (2, self.num_layers, tokens, self.hidden)

    def view(self, chunk: torch.Tensor) -> torch.Tensor:
        """A stored chunk as ``[2, L, T, H, S]``: a strided view, or a copy where strides cannot express the packing.

        Accepts the shapes servers hand out: with a leading plane axis of 1 (written by an engine), or flat. Raises
        `GeometryMismatch` when the element count is not a whole number of tokens.
        """
        if self.block_size is None:
            return self._stored(chunk)
        kv = torch.empty(2, self.num_layers, self._tokens(chunk), self.hidden, dtype=self.dtype)
        for destination, source in self.decode(chunk, kv):
            destination.copy_(source)
        return self.heads(kv)

    def decode(
        self, chunk: torch.Tensor, kv: torch.Tensor, part: Part = WHOLE
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What to copy so that ``kv`` (``[2, L, T, D]`` of the part) holds that part of a stored chunk.

        Returns destinations and sources, which are views: nothing is copied here, unless the part cuts a block of a
        packing whose blocks can only be read whole.
        """
        heads = self.heads(kv)
        if self.block_size is None:
            return [(heads, self._stored(chunk)[part.kinds, part.layers, part.tokens, part.heads])]
        tokens, block = self._tokens(chunk), self.block_size
        start, stop, _ = part.tokens.indices(tokens)
        first, last = start // block * block, -(-stop // block) * block
        if (first, last) == (start, stop):
            return [(wanted, stored) for stored, wanted in self._pairs(chunk, heads, part)]
        whole = heads.new_empty((*heads.shape[:2], last - first, *heads.shape[3:]), dtype=self.dtype)
        for stored, wanted in self._pairs(chunk, whole, part._replace(tokens=slice(first, last))):
            wanted.copy_(stored)
        return [(heads, whole[:, :, start - first : stop - first])]

    def encode(self, kv: torch.Tensor, chunk: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What to copy so that a chunk's memory holds ``kv`` (``[2, L, T, D]``); the inverse of `decode`."""
        if self.block_size is None:
            return [(self._stored(chunk), self.heads(kv))]
        return self._pairs(chunk, self.heads(kv), WHOLE)

    def _pairs(self, chunk: torch.Tensor, heads: torch.Tensor, part: Part) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of a chunk of blocks and of ``heads`` (``[2, L, T, H, S]``) that hold the same elements at the same
        place: one pair for K, one for V, whichever are wanted. The part's tokens are whole blocks."""
        tokens, block, size = self._tokens(chunk), self.block_size or 0, self.head_dim
        if tokens % block:
            raise GeometryMismatch(f"a chunk of {tokens} tokens is not whole blocks of {block}")
        rows = chunk.view(self.num_layers, tokens // block, block, self.num_kv_heads, 2 * size)
        start, stop, _ = part.tokens.indices(tokens)
        rows = rows[part.layers, start // block : stop // block, :, part.heads]
        kinds = range(2)[part.kinds]
        by_block = _split(heads, 2, -1, block)  # [kinds, L, blocks, N, H, S]
        pairs = []
        for place, kind in enumerate(kinds):  # K fills the first half of the rows, V the second: [.., N/2, H, 2S]
            half = rows.chunk(2, dim=2)[kind]
            pairs.append(self._pair(kind, half, by_block[place]))
        return pairs

    def _pair(self, kind: int, rows: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K's (0) or V's (1) rows ``[L, blocks, N/2, H, 2S]`` with its ``[L, blocks, N, H, S]``."""
        block, size = self.block_size or 0, self.head_dim
        if self.packing == "vllm-cpu-amx":
            return _amx_values(rows, kv) if kind else _amx_keys(rows, kv)
        if kind:  # V's element (token n, dim d) is p = n * S + d behind K: a row holds two tokens
            stored = _split(rows, 4, 2, size).permute(0, 1, 2, 4, 3, 5)  # [L, blocks, N/2, 2, H, S]
            return stored, _split(kv, 2, -1, 2)
        # K's element (dim d, token n) is p = d * N + n of its block.
        if block <= 2 * size:  # a row holds several dims of all the block's tokens
            dims = 2 * size // block
            stored = _split(rows, 4, dims, block).permute(0, 1, 5, 3, 2, 4)  # [L, blocks, N, H, S/dims, dims]
            return stored, _split(kv, 4, -1, dims)
        parts = block // (2 * size)  # several rows hold one dim
        stored = _split(rows, 2, size, parts).permute(0, 1, 3, 5, 4, 2)  # [L, blocks, parts, 2S, H, S]
        return stored, _split(kv, 2, parts, 2 * size)

    def _tokens(self, chunk: torch.Tensor) -> int:
        tokens, rest = divmod(chunk.numel(), 2 * self.num_layers * self.hidden)
        if rest or not tokens or chunk.dtype != self.dtype:
            raise GeometryMismatch(
                f"stored chunk {tuple(chunk.shape)} of {chunk.dtype} does not fit {self}; "
                "is the layout (heads, head size, dtype) that of the model in the server?"
            )
        return tokens

    def _stored(self, chunk: torch.Tensor) -> torch.Tensor:
        """A split or fused chunk as a view ``[2, L, T, H, S]``."""
        tokens = self._tokens(chunk)
        if self.fused:
            fused = chunk.view(self.num_layers, tokens, self.num_kv_heads, 2, self.head_dim)
            return fused.permute(3, 0, 1, 2, 4)
        return chunk.view(2, self.num_layers, tokens, self.num_kv_heads, self.head_dim)

    def heads(self, kv: torch.Tensor) -> torch.Tensor:
        """``[2, L, T, D]`` -> view ``[2, L, T, H, S]``, of however many heads."""
        return kv.view(*kv.shape[:-1], kv.shape[-1] // self.head_dim, self.head_dim)

    def check(self, kv: torch.Tensor) -> None:
        """Raise `GeometryMismatch` unless ``kv`` is a CPU ``[2, L, T, D]`` tensor of this layout."""
        want = (2, self.num_layers, "T", self.hidden)
        shape = tuple(kv.shape)
        if len(shape) != 4 or shape[:2] != want[:2] or shape[3] != self.hidden:
            raise GeometryMismatch(f"kv has shape {shape}, the model's cache needs {list(want)}")
        if kv.dtype != self.dtype:
            raise GeometryMismatch(
                f"kv is {kv.dtype}, the model's cache is {self.dtype}; convert it with kv.to({self.dtype})"
            )
        if kv.device.type != "cpu":
            raise GeometryMismatch(f"kv is on {kv.device}; the server takes CPU tensors: use kv.cpu()")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is the inverse."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "dtype": dtype_name(self.dtype),
            "packing": self.packing,
            **({"block_size": self.block_size} if self.block_size else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KVLayout:
        """Inverse of `to_dict`; `InvalidRequest` names what is missing or wrong."""
        if not isinstance(data, Mapping):
            raise InvalidRequest(f"a layout is a mapping of its fields, not {type(data).__name__}")
        try:
            fields = {key: data[key] for key in ("num_layers", "num_kv_heads", "head_dim", "packing")}
            return cls(dtype=parse_dtype(data["dtype"]), block_size=data.get("block_size"), **fields)
        except KeyError as exc:
            raise InvalidRequest(f"layout lacks the field {exc.args[0]!r}") from exc

    def shard(self, world_size: int) -> KVLayout:
        """The part of each of ``world_size`` tensor-parallel workers: its share of the heads."""
        if self.num_kv_heads % world_size:
            raise GeometryMismatch(f"{self.num_kv_heads} KV heads cannot be shared by {world_size} workers")
        return replace(self, num_kv_heads=self.num_kv_heads // world_size)

    def with_packing(self, packing: str, block_size: int | None = None) -> KVLayout:
        """The same geometry in another packing."""
        return replace(self, packing=packing, block_size=block_size)


def _amx_keys(rows: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K rows ``[L, blocks, N/2, H, 2S]`` and K ``[L, blocks, N, H, S]``, cut along AMX's units of 32."""
    per_row = keys.shape[-1] // 16  # units in a row
    # rows are (token group, dim-pair high), columns (dim-pair low, token, dim of the pair)
    k = _split(_split(_split(rows, 4, per_row, 32), 5, 16, 2), 2, -1, 8)  # [L, blocks, N/16, 8, H, S/16, 16, 2]
    k = k.permute(0, 1, 2, 6, 4, 3, 5, 7)  # [L, blocks, N/16, 16, H, 8, S/16, 2]
    return k, _split(_split(_split(keys, 4, 8, -1), 5, per_row, 2), 2, -1, 16)


def _amx_values(rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for V."""
    per_row = values.shape[-1] // 16
    # rows are (dim group, token-pair high), columns (token-pair low, dim, token of the pair)
    v = _split(_split(_split(rows, 4, per_row, 32), 5, 16, 2), 2, per_row, -1)  # [L, blocks, S/16, M, H, S/16, 16, 2]
    v = v.permute(0, 1, 3, 5, 7, 4, 2, 6)  # [L, blocks, M, S/16, 2, H, S/16, 16]
    return v, _split(_split(_split(values, 4, -1, 16), 2, v.shape[2], -1), 3, per_row, 2)


def _split(tensor: torch.Tensor, axis: int, outer: int, inner: int) -> torch.Tensor:
    """View with one axis as two; one of them may be -1."""
    length = tensor.shape[axis]
    sizes = (length // inner if outer == -1 else outer, length // outer if inner == -1 else inner)
    return tensor.view(*tensor.shape[:axis], *sizes, *tensor.shape[axis + 1 :])
