"""Samples of different lengths to one padded batch.

Axes: ``B`` batch, ``2`` K/V, ``L`` layers, ``T`` longest prefix, ``D`` hidden, ``N`` longest continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from kvdata.datasets.ring import receive, send


@dataclass
class KVBatch:
    """A batch of cached prefixes, padded on the right with zeros.

    Attributes:
        kv: ``[B, 2, L, T, D]``.
        tokens: ``[B, T]`` int64.
        mask: ``[B, T]`` bool, True at real tokens.
        lengths: ``[B]`` tokens of each prefix.
        start: ``[B]`` position of each row's first token in its prefix; 0 unless a window was asked for.
        index: ``[B]`` position of each sample in the dataset.
        continuation: ``[B, N]`` int64.
        continuation_mask: ``[B, N]`` bool.
        salts: each sample's salt.
        meta: each sample's labels.
    """

    kv: torch.Tensor = field(repr=False)
    tokens: torch.Tensor = field(repr=False)
    mask: torch.Tensor
    lengths: torch.Tensor
    start: torch.Tensor
    index: torch.Tensor
    continuation: torch.Tensor = field(repr=False)
    continuation_mask: torch.Tensor
    salts: list[str]
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
        start=torch.tensor([sample["start"] for sample in samples]),
        index=torch.tensor([sample["index"] for sample in samples]),
        continuation=continuation,
        continuation_mask=continuation_mask,
        salts=[sample["salt"] for sample in samples],
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
    """``[2, L, T_i, D]`` tensors to ``[B, 2, L, longest, D]``; the first axis is 1 where only K or V was read."""
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
    step = first.shape[0] * first.stride(0)
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


def _reduce(batch: KVBatch) -> tuple[Any, ...]:
    """A batch on its way between processes: its cache by number where it lies in a worker's ring, the rest by value."""
    small = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "kv"}
    small = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in small.items()}
    sent = send(batch.kv)
    return (_rebuild, (sent, None if sent else batch.kv, small))


def _rebuild(sent: tuple[Any, ...] | None, kv: torch.Tensor | None, small: dict[str, Any]) -> KVBatch:
    values: dict[str, Any] = {"kv": receive(*sent) if sent else kv}
    for name, value in small.items():
        values[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return KVBatch(**values)


ForkingPickler.register(KVBatch, _reduce)
