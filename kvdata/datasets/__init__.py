"""Datasets over cached KV."""

from kvdata.datasets.collate import KVBatch, collate
from kvdata.datasets.kvcache import Coverage, KVCacheDataset, Sample
from kvdata.datasets.live import LiveKVDataset
from kvdata.datasets.manifest import Manifest, Written
from kvdata.datasets.prefixes import Prefixes, PrefixRecord
from kvdata.datasets.workers import worker_init_fn

__all__ = [
    "Coverage",
    "KVBatch",
    "KVCacheDataset",
    "LiveKVDataset",
    "Manifest",
    "PrefixRecord",
    "Prefixes",
    "Sample",
    "Written",
    "collate",
    "worker_init_fn",
]
