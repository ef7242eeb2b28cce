"""`KVSnapshotDataset`: a snapshot as a map-style PyTorch dataset.

Axes: ``B`` batch, ``2`` K/V, ``L'`` layers that are read, ``T`` tokens, ``D`` hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvdata.client.copying import Pair, copy_all
from kvdata.client.selection import Index, Selection
from kvdata.datasets.base import CacheDataset
from kvdata.datasets.buffers import Allocate
from kvdata.datasets.sample import Sample, Transform, make_sample
from kvdata.datasets.snapshot.snapshot import Snapshot
from kvdata.errors import GeometryMismatch, SnapshotIncomplete

if TYPE_CHECKING:
    from kvdata.datasets.snapshot.shards import Shard


class KVSnapshotDataset(CacheDataset):
    """The caches of a snapshot folder, with `KVCacheDataset`'s samples: no server, no eviction.

    Prefixes that were skipped when the snapshot was written are not in it: ``index`` is a sample's place in this
    dataset and in its `prefixes`. The ``kv`` of a single sample (``dataset[i]``) is a view of the mapped file, unless
    it was converted, transformed or of some layers: what is written into it stays for this process. Files are mapped
    when first read, in each process; a pickle carries the path and the arguments. Pass it to a `KVLoader`, or to
    ``DataLoader(..., collate_fn=kvdata.datasets.collate)`` under any start method.

    Args:
        path: folder that `Snapshot.write` or ``kvdata snapshot`` wrote.
        layers: numbers of the model's layers or a slice of them; only these are read. All must be in the snapshot.
        dtype: convert the samples' KV to this dtype.
        transform: function of a sample, applied last, in the worker.

    Raises:
        SnapshotIncomplete: the writing was interrupted.
        SnapshotError: as `Snapshot`.
        GeometryMismatch: a layer is not in the snapshot.
        ImportError: safetensors is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        layers: Index = None,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
    ) -> None:
        from kvdata.datasets.snapshot.shards import Shard

        self.snapshot = snapshot = Snapshot(path)
        self.path, self.layers, self.dtype, self.transform = snapshot.path, layers, dtype, transform
        if not snapshot.complete:
            raise SnapshotIncomplete(
                f"{path} holds {len(snapshot)} of {snapshot.index.prefixes} prefixes, and {len(snapshot.skipped)} are "
                "known to be missing; write it again to fetch the rest, with on_missing='skip' if some are gone"
            )
        self.layout = snapshot.layout
        places = [place for place, _, _ in snapshot.samples]
        self.prefixes = snapshot.prefixes.select(places) if snapshot.skipped else snapshot.prefixes
        self._rows = None if layers is None else _rows(layers, snapshot)
        self._reset()
        self._shard_type = Shard
        self._shards: dict[int, Shard] = {}

    def __len__(self) -> int:
        return len(self.snapshot)

    def _one(self, index: int) -> Sample:
        index = range(len(self))[index]
        view = self._view(index)
        kv = view if self._rows is None else view[:, self._rows]
        kv = kv if self.dtype is None else kv.to(self.dtype)
        if self.transform is not None and kv is view:
            kv = kv.clone()  # a transform may write
        return self._sample(index, kv)

    def fetch(self, indices: Sequence[int], allocate: Allocate) -> list[Sample]:
        """A batch in a buffer ``[B, 2, L', T, D]`` that ``allocate(shape, dtype)`` gives; ``T`` is the longest's.

        Each sample's ``kv`` is a view of its row, as far as its tokens go: one copy out of the mapped files.
        """
        places = [range(len(self))[index] for index in indices]
        views = [self._view(place) for place in places]
        if not views:
            return []
        buffer = allocate(self._shape(views), self.dtype or self.snapshot.dtype)
        targets = [row[:, :, : view.shape[2]] for row, view in zip(buffer, views, strict=True)]
        pairs: list[Pair] = []
        for target, view in zip(targets, views, strict=True):
            if self._rows is None:
                pairs.append((target, view))
            else:
                pairs += [(target[:, to], view[:, row]) for to, row in enumerate(self._rows)]
        copy_all(pairs)
        return [self._sample(place, target) for place, target in zip(places, targets, strict=True)]

    def batch_bytes(self, indices: Sequence[int]) -> int:
        """Size of the buffer that `fetch` allocates for these indices."""
        views = [self._view(range(len(self))[index]) for index in indices]
        return math.prod(self._shape(views)) * (self.dtype or self.snapshot.dtype).itemsize if views else 0

    def _shape(self, views: Sequence[torch.Tensor]) -> tuple[int, ...]:
        kinds, held, _, hidden = views[0].shape
        layers = held if self._rows is None else len(self._rows)
        return len(views), kinds, layers, max(view.shape[2] for view in views), hidden

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("path", "layers", "dtype", "transform")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        KVSnapshotDataset.__init__(self, **state)

    def _sample(self, index: int, kv: torch.Tensor) -> Sample:
        _, hit, _ = self.snapshot.samples[index]
        record = self.prefixes[index]
        sample = make_sample(kv, index, record, hit, record.salt_or(""), self.snapshot.selection)
        return sample if self.transform is None else self.transform(sample)

    def _view(self, index: int) -> torch.Tensor:
        """A sample's whole ``[2, L, T, D]`` in the mapped file."""
        place, _, number = self.snapshot.samples[index]
        if number not in self._shards:
            self._shards[number] = self._shard_type(self.snapshot.path / self.snapshot.index.shards[number].file)
        return self._shards[number].view(place)


def _rows(layers: Index, snapshot: Snapshot) -> list[int]:
    """Where the wanted layers are in a snapshot's tensors."""
    wanted = Selection(layers=layers).layer_numbers(snapshot.layout)
    absent = set(wanted) - set(snapshot.layers)
    if absent:
        raise GeometryMismatch(
            f"layers {sorted(absent)} are not in {snapshot.path}, which has {snapshot.layers}; write one with them"
        )
    return [snapshot.layers.index(layer) for layer in wanted]
