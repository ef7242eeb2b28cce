"""Train on live KV caches: tokens in, ``[2, L, T, D]`` tensors out, compressed tensors back in."""

from kvdata.client.connection import Connection
from kvdata.client.context import KVCacheContext
from kvdata.client.storing import StoreReport
from kvdata.datasets import (
    KVBatch,
    KVCacheDataset,
    KVLoader,
    KVSnapshotDataset,
    LiveKVDataset,
    Prefixes,
    PrefixRecord,
    Snapshot,
    collate,
    worker_init_fn,
)
from kvdata.errors import KVCacheSDKError
from kvdata.layout import KVLayout
from kvdata.sdk.kvcache import close, connect, retrieve, store

__version__ = "0.1.0"

__all__ = [
    "Connection",
    "KVBatch",
    "KVCacheContext",
    "KVCacheDataset",
    "KVCacheSDKError",
    "KVLayout",
    "KVLoader",
    "KVSnapshotDataset",
    "LiveKVDataset",
    "PrefixRecord",
    "Prefixes",
    "Snapshot",
    "StoreReport",
    "close",
    "collate",
    "connect",
    "retrieve",
    "store",
    "worker_init_fn",
]
