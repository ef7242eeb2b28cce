"""Datasets over cached KV."""

from kvdata.datasets.collate import KVBatch, collate
from kvdata.datasets.kvcache import Coverage, KVCacheDataset
from kvdata.datasets.live import LiveKVDataset
from kvdata.datasets.loader import KVLoader
from kvdata.datasets.manifest import Manifest, Written
from kvdata.datasets.prefixes import Prefixes, PrefixRecord
from kvdata.datasets.refill import Refill
from kvdata.datasets.sample import Sample
from kvdata.datasets.samplers import KVBatchSampler
from kvdata.datasets.snapshot import KVSnapshotDataset, Snapshot, SnapshotReport
from kvdata.datasets.splits import DocumentSplits, split_by_document
from kvdata.datasets.worker_loader import KVDataLoader
from kvdata.datasets.workers import worker_init_fn

__all__ = [
    "Coverage",
    "DocumentSplits",
    "KVBatch",
    "KVBatchSampler",
    "KVCacheDataset",
    "KVDataLoader",
    "KVLoader",
    "KVSnapshotDataset",
    "LiveKVDataset",
    "Manifest",
    "PrefixRecord",
    "Prefixes",
    "Refill",
    "Sample",
    "Snapshot",
    "SnapshotReport",
    "Written",
    "collate",
    "split_by_document",
    "worker_init_fn",
]
