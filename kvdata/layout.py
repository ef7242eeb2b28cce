"""Geometry of a model's KV cache, and how one stored chunk maps to ``[2, L, T, D]``.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``H`` KV heads, ``S`` head size, ``D = H * S``.

This is the only module that knows byte orders. A packing says how the elements of one stored chunk lie in
memory; both packings here are plain strides, so decoding is a view and one copy:

* ``split``: ``[2, L, T, H, S]``, one K plane and one V plane.
* ``fused``: ``[L, T, H, 2 * S]``, the K dims of a head followed by its V dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvdata.errors import GeometryMismatch, InvalidRequest

PACKINGS = ("split", "fused")
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
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise InvalidRequest(f"KV dtype {name!r} is not supported; known: {', '.join(DTYPES)}")
    return dtype


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of one model's KV cache and the packing of its stored chunks.

    Args:
        num_layers: decoder layers ``L``.
        num_kv_heads: key/value heads ``H`` (after grouping, not query heads).
        head_dim: size ``S`` of one head.
        dtype: element type of the stored cache.
        packing: ``"split"`` or ``"fused"``.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    packing: str = "split"

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidRequest(f"KVLayout.{field} must be a positive int, got {value!r}")
        if self.packing not in PACKINGS:
            raise InvalidRequest(f"unknown packing {self.packing!r}; known: {', '.join(PACKINGS)}")
        parse_dtype(dtype_name(self.dtype))

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
        """A stored chunk as a strided view ``[2, L, T, H, S]``; nothing is copied.

        Accepts the shapes servers hand out: with a leading plane axis of 1 (written by an engine), or
        flat. Raises `GeometryMismatch` when the element count is not a whole number of tokens.
        """
        per_token = 2 * self.num_layers * self.hidden
        tokens, rest = divmod(chunk.numel(), per_token)
        if rest or not tokens or chunk.dtype != self.dtype:
            raise GeometryMismatch(
                f"stored chunk {tuple(chunk.shape)} of {chunk.dtype} does not fit {self}; "
                "is the layout (heads, head size, dtype) that of the model in the server?"
            )
        if self.fused:
            fused = chunk.view(self.num_layers, tokens, self.num_kv_heads, 2, self.head_dim)
            return fused.permute(3, 0, 1, 2, 4)
        return chunk.view(2, self.num_layers, tokens, self.num_kv_heads, self.head_dim)

    def heads(self, kv: torch.Tensor) -> torch.Tensor:
        """``[2, L, T, D]`` -> view ``[2, L, T, H, S]``."""
        return kv.view(*kv.shape[:-1], self.num_kv_heads, self.head_dim)

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
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KVLayout:
        """Inverse of `to_dict`; `InvalidRequest` names what is missing."""
        try:
            fields = {key: data[key] for key in ("num_layers", "num_kv_heads", "head_dim", "packing")}
            return cls(dtype=parse_dtype(data["dtype"]), **fields)
        except KeyError as exc:
            raise InvalidRequest(f"layout lacks the field {exc.args[0]!r}") from exc

    def with_packing(self, packing: str) -> KVLayout:
        """The same geometry in another packing."""
        return replace(self, packing=packing)
