"""PyTorch Lightning pieces: write compressed caches back while a Trainer runs."""

from kvdata.lightning.writer import CacheWrite, KVCacheWriter, WriteCounts

__all__ = ["CacheWrite", "KVCacheWriter", "WriteCounts"]
