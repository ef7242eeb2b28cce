"""`KVDataLoader`: PyTorch's DataLoader over caches, resumable."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from kvdata.datasets.base import CacheDataset
from kvdata.datasets.collate import collate
from kvdata.datasets.samplers import KVBatchSampler, Resumable
from kvdata.datasets.workers import worker_init_fn


class KVDataLoader(Resumable, DataLoader[Any]):
    """A ``DataLoader`` with worker processes, whose batches are those of a `KVLoader` with the same arguments.

    Worth its processes when a ``transform`` or ``collate_fn`` computes much in Python.

    Args:
        dataset, batch_size, shuffle, sampler, drop_last, max_tokens, seed: as in `KVLoader`.
        collate_fn: samples -> batch.
        kwargs: ``num_workers`` and the rest of a ``DataLoader``'s.
    """

    def __init__(
        self,
        dataset: CacheDataset,
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: KVBatchSampler | None = None,
        drop_last: bool = False,
        max_tokens: int | None = None,
        seed: int = 0,
        *,
        collate_fn: Callable[[list[Any]], Any] = collate,
        **kwargs: Any,
    ) -> None:
        sampler = sampler or KVBatchSampler(dataset, batch_size or 1, shuffle, drop_last, max_tokens, seed)
        # Frameworks that make a loader anew look for an attribute for each argument.
        self.shuffle, self.max_tokens, self.seed = shuffle, max_tokens, seed
        options = {"worker_init_fn": worker_init_fn, **kwargs, "batch_size": None}
        DataLoader.__init__(self, dataset, sampler=sampler, collate_fn=collate_fn, **options)

    def __iter__(self) -> Any:
        return self.sampler.taken(_without_cycles(DataLoader.__iter__(self)))


def _without_cycles(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches; after an error their iterator is freed with it.

    PyTorch raises a worker's error from a frame that refers to it. That keeps the iterator until some garbage
    collection, which waits 5 s for each worker wherever it happens to run: inside a call with a deadline, say.
    """
    try:
        yield from batches
    except Exception as exc:
        traceback.clear_frames(exc.__traceback__)
        raise
