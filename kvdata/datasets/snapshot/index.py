"""``snapshot.json``: whose caches a folder holds, in which shards, and what could not be had."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvdata.datasets.snapshot.files import replacing
from kvdata.errors import OtherSnapshot, SnapshotDamaged, SnapshotError, UnsupportedSnapshot

INDEX, PREFIXES = "snapshot.json", "prefixes.jsonl"
VERSION = 1
SHARD_NAME = "shard-{:05d}.safetensors"
_SHARD = re.compile(r"shard-\d{5,9}\.safetensors")  # no other file is read, whoever wrote the index

_IDENTITY = {
    "model_name": "model name",
    "layout": "layout",
    "dtype": "dtype",
    "layers": "list of layers",
    "heads": "list of heads",
    "window": "window of tokens",
    "kinds": "choice of K and V",
    "prefixes": "number of prefixes",
    "prefixes_blake3": "digest of the prefixes (tokens, continuations, salts, labels)",
}


class ShardEntry(msgspec.Struct, frozen=True):
    """One finished shard.

    Attributes:
        file: its name in the folder.
        bytes: its size.
        blake3: its digest.
        samples: place in the prefix file and cached tokens of each sample in it.
    """

    file: str
    bytes: int
    blake3: str
    samples: list[tuple[int, int]]


class Index(msgspec.Struct):
    """What a snapshot is of, and how far it got.

    Attributes:
        model_name, layout: whose cache.
        dtype: of the shards' tensors.
        layers, heads: the model's layers and KV heads in the tensors' order.
        window: first token and the one behind the last, as a slice takes them.
        kinds: K, V or both.
        prefixes: how many prefixes there are.
        prefixes_blake3: digest of the prefix file.
        shards: the finished ones.
        skipped: places of prefixes that the server did not hold.
    """

    model_name: str
    layout: dict[str, Any]
    dtype: str
    layers: list[int]
    prefixes: int
    prefixes_blake3: str
    heads: list[int]
    window: tuple[int | None, int | None] = (None, None)
    kinds: tuple[str, ...] = ("k", "v")
    shards: list[ShardEntry] = []
    skipped: list[int] = []
    kvdata_snapshot: int = VERSION

    @classmethod
    def load(cls, folder: Path) -> Index:
        """Read a folder's index.

        Raises:
            SnapshotError: there is none.
            UnsupportedSnapshot: written by a newer kvdata.
            SnapshotDamaged: it is not an index.
        """
        try:
            raw = (folder / INDEX).read_bytes()
        except OSError as exc:
            raise SnapshotError(f"{folder} holds no snapshot ({exc}); write one with kvdata snapshot") from exc
        try:
            version = msgspec.json.decode(raw, type=_Version).kvdata_snapshot
            if version != VERSION:
                raise UnsupportedSnapshot(
                    f"{folder} is a snapshot of version {version}, this kvdata reads version {VERSION}; upgrade "
                    "kvdata, or write the snapshot into another folder"
                )
            index = msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise SnapshotDamaged(f"{folder / INDEX} is no index ({exc}); write into another folder") from exc
        if not all(_SHARD.fullmatch(shard.file) for shard in index.shards):
            raise SnapshotDamaged(f"{folder / INDEX} lists files that are no shards; write into another folder")
        places = [place for place, _ in index.samples()] + index.skipped
        if len(set(places)) < len(places) or not all(0 <= place < index.prefixes for place in places):
            raise SnapshotDamaged(f"{folder / INDEX} lists prefixes twice or beyond its {index.prefixes}")
        return index

    def save(self, folder: Path) -> None:
        """Write the index, whole or not at all."""
        with replacing(folder / INDEX) as part:
            part.write_bytes(msgspec.json.encode(self) + b"\n")

    def samples(self) -> Iterable[tuple[int, int]]:
        """Place and cached tokens of every sample, shard by shard."""
        return (sample for shard in self.shards for sample in shard.samples)

    def require_same(self, wanted: Index, folder: Path) -> None:
        """`OtherSnapshot` unless both are of the same caches."""
        for name, words in _IDENTITY.items():
            have, want = getattr(self, name), getattr(wanted, name)
            if have != want:
                raise OtherSnapshot(
                    f"{folder} holds another snapshot: its {words} is {have}, not {want}; choose another folder"
                )

    def check_files(self, folder: Path) -> None:
        """`SnapshotDamaged` unless every shard is there in its size."""
        for shard in self.shards:
            file = folder / shard.file
            size = file.stat().st_size if file.is_file() else None
            if size is None:
                raise SnapshotDamaged(f"{file} is gone; write the snapshot again to fetch what was in it")
            if size != shard.bytes:
                raise SnapshotDamaged(
                    f"{file} has {size:,} bytes and was written with {shard.bytes:,}; delete this file and write the "
                    "snapshot again"
                )


class _Version(msgspec.Struct):
    kvdata_snapshot: int
