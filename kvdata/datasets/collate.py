"""Samples of different lengths to one padded batch.

Axes: ``B`` batch, ``2`` K/V, ``L`` layers, ``T`` longest prefix, ``D`` hidden, ``N`` longest continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch


@dataclass
class KVBatch:
    """A batch of cached prefixes, padded on the right with zeros.

    Attributes:
        kv: ``[B, 2, L, T, D]``.
        tokens: ``[B, T]`` int64.
        mask: ``[B, T]`` bool, True at real tokens.
        lengths: ``[B]`` tokens of each prefix.
        index: ``[B]`` position of each sample in the dataset.
        continuation: ``[B, N]`` int64.
        continuation_mask: ``[B, N]`` bool.
        meta: each sample's labels.
    """

    kv: torch.Tensor
    tokens: torch.Tensor
    mask: torch.Tensor
    lengths: torch.Tensor
    index: torch.Tensor
    continuation: torch.Tensor
    continuation_mask: torch.Tensor
    meta: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, *args: Any, **kwargs: Any) -> KVBatch:
        """The batch on another device. Takes `torch.Tensor.to`'s device arguments; a dtype is for ``kv`` alone."""
        moved = {}
        for name, value in self._tensors().items():
            target = value.to(*args, **kwargs)
            moved[name] = target if name == "kv" else target.to(value.dtype)
        return replace(self, **moved)

    def pin_memory(self) -> KVBatch:
        """The batch in page-locked memory, as ``DataLoader(pin_memory=True)`` asks for."""
        return replace(self, **{name: value.pin_memory() for name, value in self._tensors().items()})

    def _tensors(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def collate(samples: Sequence[dict[str, Any]]) -> KVBatch:
    """Samples of a `KVCacheDataset` to one `KVBatch`.

    When all ``kv`` are consecutive rows of one buffer, as ``__getitems__`` makes them, the batch is that buffer and
    nothing is copied but the padding's zeros.
    """
    lengths = [int(sample["kv"].shape[2]) for sample in samples]
    tokens, mask = _pad([sample["tokens"] for sample in samples])
    continuation, continuation_mask = _pad([sample["continuation"] for sample in samples])
    return KVBatch(
        kv=_stack([sample["kv"] for sample in samples], max(lengths)),
        tokens=tokens,
        mask=mask,
        lengths=torch.tensor(lengths),
        index=torch.tensor([sample["index"] for sample in samples]),
        continuation=continuation,
        continuation_mask=continuation_mask,
        meta=[sample["meta"] for sample in samples],
    )


def _pad(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(row) for row in rows)
    padded = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
        mask[i, : len(row)] = True
    return padded, mask


def _stack(caches: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    """``[2, L, T_i, D]`` tensors to ``[B, 2, L, longest, D]``."""
    first = caches[0]
    shared = _common_buffer(caches, longest)
    if shared is None:
        shared = first.new_empty((len(caches), *first.shape[:2], longest, first.shape[3]))
        for row, kv in zip(shared, caches, strict=True):
            row[:, :, : kv.shape[2]] = kv
    for row, kv in zip(shared, caches, strict=True):
        row[:, :, kv.shape[2] :] = 0
    return shared


def _common_buffer(caches: Sequence[torch.Tensor], longest: int) -> torch.Tensor | None:
    """The buffer of which all ``caches`` are consecutive rows, or None."""
    first = caches[0]
    step = 2 * first.stride(0)
    storage = first.untyped_storage()
    fits = first.storage_offset() + len(caches) * step <= storage.nbytes() // first.element_size()
    if not fits or longest * first.shape[3] > first.stride(1) or first.stride(0) != first.shape[1] * first.stride(1):
        return None
    for i, kv in enumerate(caches):
        same = kv.untyped_storage().data_ptr() == storage.data_ptr() and kv.stride() == first.stride()
        if not same or kv.dtype != first.dtype or kv.storage_offset() != first.storage_offset() + i * step:
            return None
    shape = (len(caches), *first.shape[:2], longest, first.shape[3])
    return torch.as_strided(first, shape, (step, *first.stride()), first.storage_offset())
