"""Connecting in DataLoader workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

from kvdata.datasets.kvcache import KVCacheDataset


def worker_init_fn(worker_id: int) -> None:
    """``DataLoader(worker_init_fn=...)``: connect this worker's `KVCacheDataset` before its first batch.

    Finds datasets inside ``Subset``, ``ConcatDataset`` and other wrappers that keep them in ``dataset`` or
    ``datasets``. Without it a worker connects at its first item; with it a wrong URL fails at start-up.
    """
    info = get_worker_info()
    if info is not None:
        for dataset in _kv_datasets(info.dataset):
            dataset.open()


def _kv_datasets(dataset: Any) -> list[KVCacheDataset]:
    if isinstance(dataset, KVCacheDataset):
        return [dataset]
    inner = getattr(dataset, "datasets", None) or getattr(dataset, "dataset", None)
    if inner is None:
        return []
    parts = inner if isinstance(inner, (list, tuple)) else [inner]
    return [found for part in parts for found in _kv_datasets(part)]
