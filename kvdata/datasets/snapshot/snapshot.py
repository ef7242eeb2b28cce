"""`Snapshot`: a folder of caches, written from a `KVCacheDataset` and checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from kvdata.client.selection import Selection
from kvdata.datasets.ingest import Progress
from kvdata.datasets.kvcache import KVCacheDataset
from kvdata.datasets.prefixes import Prefixes
from kvdata.datasets.snapshot.files import unchanged
from kvdata.datasets.snapshot.index import PREFIXES, Index
from kvdata.errors import InvalidRequest, SnapshotDamaged
from kvdata.layout import KVLayout, parse_dtype

SHARD_BYTES = 10**9


@dataclass
class SnapshotReport:
    """What became of each prefix, by its place in the dataset.

    Attributes:
        fetched: read from the server now.
        present: in the folder before.
        skipped: not cached, by the dataset's rule (``on_missing``, ``min_hit_tokens``).
        bytes: size of all shards.
    """

    fetched: list[int] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    bytes: int = 0

    def __str__(self) -> str:
        parts = [f"{len(self.fetched)} fetched", f"{len(self.present)} were there already"]
        parts += [f"{len(self.skipped)} not cached"] if self.skipped else []
        return f"{', '.join(parts)}, {self.bytes / 1e9:,.3f} GB"


class Snapshot:
    """A snapshot folder, opened: its index is read and every shard is there in its size.

    Args:
        path: the folder.

    Attributes:
        model_name, layout: whose cache it is of.
        dtype: of the samples as they are kept.
        layers: the model's layers that are kept, in this order.
        selection: what is kept of each prefix.
        samples: place in `prefixes`, cached tokens and shard number of each sample, by place.
        skipped: places of prefixes that the server did not hold.

    Raises:
        SnapshotError: the folder holds no snapshot.
        UnsupportedSnapshot: a newer kvdata wrote it.
        SnapshotDamaged: a file is gone, or has another size than it was written with.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.index = index = Index.load(self.path)
        index.check_files(self.path)
        self.model_name = index.model_name
        self.layers = index.layers
        try:
            self.layout = KVLayout.from_dict(index.layout)
            self.dtype = parse_dtype(index.dtype)
            self.selection = Selection(index.layers, index.heads, slice(*index.window), index.kinds)
        except InvalidRequest as exc:
            raise SnapshotDamaged(f"the index of {path} describes no cache ({exc}); write into another folder") from exc
        self.skipped = index.skipped
        self.samples = sorted(
            (place, hit, number) for number, shard in enumerate(index.shards) for place, hit in shard.samples
        )

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def complete(self) -> bool:
        """Every prefix was fetched or found missing: the writing came to its end."""
        return len(self.samples) + len(self.skipped) == self.index.prefixes

    @cached_property
    def prefixes(self) -> Prefixes:
        """All prefixes, also those that were skipped; `SnapshotDamaged` when the file has changed."""
        file = self.path / PREFIXES
        if not unchanged(file, self.index.prefixes_blake3):
            raise SnapshotDamaged(f"{file} is gone or was changed; write the snapshot again, which puts it back")
        return Prefixes.from_jsonl(file)

    @classmethod
    def write(
        cls,
        dataset: KVCacheDataset,
        path: str | Path,
        *,
        shard_bytes: int = SHARD_BYTES,
        progress: Progress | None = None,
    ) -> SnapshotReport:
        """Fetch what a folder does not hold yet of a dataset's caches: its prefixes, selection and dtype.

        Samples are kept as the dataset gives them before its ``transform``. After an interruption call it again:
        finished shards stay. Prefixes that were skipped are tried again. About two shards of host memory.

        Args:
            dataset: the caches. Labels (``meta``) must be what JSON can hold.
            path: the folder; new, empty, or with a snapshot of the same caches.
            shard_bytes: largest size of a shard, unless one sample is larger.
            progress: wraps the iteration over the prefixes that are fetched.

        Raises:
            MissingKV: a prefix is not cached, and the dataset says ``on_missing="raise"``.
            OtherSnapshot: the folder holds something else; nothing was changed.
            DiskFull: no room; finished shards are kept.
            SnapshotDamaged, UnsupportedSnapshot: as when opening.
            SnapshotError: another process is writing, or the folder cannot be written.
            ImportError: safetensors is not installed.
        """
        from kvdata.datasets.snapshot.writing import write

        return write(dataset, Path(path), shard_bytes, progress)

    @classmethod
    def verify(cls, path: str | Path, progress: Progress | None = None) -> Snapshot:
        """Open a snapshot and compare every file with its digest; `SnapshotDamaged` names those that changed."""
        snapshot = cls(path)
        written = [(PREFIXES, snapshot.index.prefixes_blake3), *((s.file, s.blake3) for s in snapshot.index.shards)]
        wrapped = progress(written, len(written)) if progress else written
        changed = [file for file, expected in wrapped if not unchanged(snapshot.path / file, expected)]
        if changed:
            raise SnapshotDamaged(
                f"changed since they were written: {', '.join(changed)}; delete them and write the snapshot again"
            )
        return snapshot
