"""Selected caches of a server in a local folder: written once, read in every epoch.

A folder holds ``snapshot.json`` (the index), ``prefixes.jsonl`` (the prefix file, salts filled in) and shards
``shard-00000.safetensors``, whose tensors ``[2, L', T, D]`` are named by the prefix's place in that file.
"""

from kvdata.datasets.snapshot.dataset import KVSnapshotDataset
from kvdata.datasets.snapshot.snapshot import Snapshot, SnapshotReport

__all__ = ["KVSnapshotDataset", "Snapshot", "SnapshotReport"]
