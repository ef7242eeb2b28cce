"""PyTorch Lightning pieces: caches as a data module, their cost in the logs, compressed caches written back."""

from kvdata.lightning.cache_write import CacheWrite, WriteCounts
from kvdata.lightning.datamodule import KVCacheDataModule
from kvdata.lightning.document import KVCacheDocument
from kvdata.lightning.documents import KVCacheDocuments
from kvdata.lightning.stats import KVCacheStats
from kvdata.lightning.writer import KVCacheWriter

__all__ = [
    "CacheWrite",
    "KVCacheDataModule",
    "KVCacheDocument",
    "KVCacheDocuments",
    "KVCacheStats",
    "KVCacheWriter",
    "WriteCounts",
]
