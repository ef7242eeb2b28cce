"""Writing a snapshot: what a folder lacks, batch by batch from the server, shard by shard to the disk."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from blake3 import blake3

from kvdata.datasets.buffers import Buffers
from kvdata.datasets.ingest import Progress
from kvdata.datasets.kvcache import KVCacheDataset
from kvdata.datasets.prefixes import Prefixes
from kvdata.datasets.sample import Sample
from kvdata.datasets.snapshot.files import PARTS, claimed, digest, replacing, unchanged
from kvdata.datasets.snapshot.index import INDEX, PREFIXES, SHARD_NAME, Index, ShardEntry
from kvdata.datasets.snapshot.shards import write_shard
from kvdata.datasets.snapshot.snapshot import SnapshotReport
from kvdata.errors import InvalidRequest, MissingKV, OtherSnapshot, SnapshotError
from kvdata.layout import dtype_name, parse_dtype

_BATCH_ROWS = 16  # lookups in flight together
_BATCHES_PER_SHARD = 4  # a batch is held beside the shard that is being filled


def write(dataset: KVCacheDataset, folder: Path, shard_bytes: int, progress: Progress | None) -> SnapshotReport:
    """As `Snapshot.write`."""
    if shard_bytes < 1:
        raise InvalidRequest(f"shard_bytes must be at least 1, got {shard_bytes}")
    source = copy.copy(dataset)  # as if pickled: with a context of its own
    source.transform = None
    source.skip_limit = 1.0  # what is missing is reported instead
    try:
        wanted, lines = _described(source)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise SnapshotError(f"{folder} cannot be made: {exc}") from exc
        with claimed(folder):
            return _Writing(source, folder, _begun(folder, wanted, lines), shard_bytes).run(progress)
    finally:
        source.close()


class _Writing:
    """One run: fills the folder up."""

    def __init__(self, source: KVCacheDataset, folder: Path, index: Index, shard_bytes: int) -> None:
        self._source, self._folder, self._index, self._shard_bytes = source, folder, index, shard_bytes
        self._report = SnapshotReport(present=sorted(place for place, _ in index.samples()))
        self._filling: dict[int, torch.Tensor] = {}
        self._hits: dict[int, int] = {}
        self._size = 0
        self._buffers = Buffers()

    def run(self, progress: Progress | None) -> SnapshotReport:
        present = set(self._report.present)
        pending = [place for place in range(self._index.prefixes) if place not in present]
        fetched: Iterable[tuple[int, Sample | None]] = self._fetched(pending)
        for place, sample in progress(fetched, len(pending)) if progress else fetched:
            if sample is None:
                self._report.skipped.append(place)
            else:
                self._add(place, sample)
        self._finish_shard()
        self._report.bytes = sum(shard.bytes for shard in self._index.shards)
        return self._report

    def _fetched(self, pending: Sequence[int]) -> Iterator[tuple[int, Sample | None]]:
        for batch in self._batches(pending):
            try:
                samples = self._source.fetch(batch, self._buffers, substitutes=False)
                found = {sample["index"]: sample for sample in samples}
            except MissingKV:
                if self._source.on_missing == "raise":
                    raise
                found = {}  # none of them
            for place in batch:
                yield place, found.pop(place, None)

    def _batches(self, pending: Sequence[int]) -> Iterator[list[int]]:
        """Consecutive places, so many as a padded buffer of a part of a shard holds; at least one."""
        limit = self._shard_bytes // _BATCHES_PER_SHARD
        batch: list[int] = []
        for place in pending:
            if batch and (len(batch) == _BATCH_ROWS or self._source.batch_bytes([*batch, place]) > limit):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    def _add(self, place: int, sample: Sample) -> None:
        kv = sample["kv"].contiguous()
        if self._filling and self._size + kv.nbytes > self._shard_bytes:
            self._finish_shard()
        self._filling[place] = kv
        self._size += kv.nbytes
        self._hits[place] = sample["hit_tokens"]

    def _finish_shard(self) -> None:
        """The shard that is being filled, and then the index, onto the disk."""
        if self._filling:
            self._index.shards.append(self._write_shard())
            self._report.fetched += self._filling
            self._filling, self._hits, self._size = {}, {}, 0
        stored = {place for place, _ in self._index.samples()}
        self._index.skipped = sorted({*self._index.skipped, *self._report.skipped} - stored)
        self._index.save(self._folder)

    def _write_shard(self) -> ShardEntry:
        used = {shard.file for shard in self._index.shards}
        names = (SHARD_NAME.format(number) for number in range(len(used) + 1))
        file = next(name for name in names if name not in used)
        with replacing(self._folder / file) as part:
            write_shard(part, self._filling)
            size, checksum = part.stat().st_size, digest(part)
        return ShardEntry(file, size, checksum, list(self._hits.items()))


def _described(source: KVCacheDataset) -> tuple[Index, str]:
    """The index of a snapshot of these caches, still without shards, and its prefix file."""
    layout, name = source.context.layout, source.connection.model_name
    records = (replace(record, salt=record.salt_or(source.cache_salt)) for record in source.prefixes)
    lines = "".join(Prefixes(records, layout, name).lines())
    dtype = dtype_name(parse_dtype(dtype_name(source.dtype or layout.dtype)))
    selection = source.selection
    window = selection.window or slice(None)
    index = Index(
        name,
        layout.to_dict(),
        dtype,
        list(selection.layer_numbers(layout)),
        len(source),
        blake3(lines.encode()).hexdigest(),
        list(selection.head_numbers(layout)),
        (window.start, window.stop),
        tuple(selection.kinds),
    )
    return index, lines


def _begun(folder: Path, wanted: Index, lines: str) -> Index:
    """The folder's index, of the wanted caches, with a sound prefix file and only what it lists beside it."""
    if (folder / INDEX).exists():
        index = Index.load(folder)
        index.require_same(wanted, folder)
        index.shards = [shard for shard in index.shards if (folder / shard.file).exists()]
        index.check_files(folder)
    elif any(entry.name != PARTS for entry in folder.iterdir()):
        raise OtherSnapshot(f"{folder} holds files that are no snapshot; choose a new or an empty folder")
    else:
        index = wanted
    index.save(folder)
    if not unchanged(folder / PREFIXES, index.prefixes_blake3):
        with replacing(folder / PREFIXES) as part:
            part.write_text(lines, encoding="utf-8")
    _clean(folder, {shard.file for shard in index.shards})
    return index


def _clean(folder: Path, listed: set[str]) -> None:
    """Remove what an interrupted run left: parts, and a shard that was finished but not listed yet."""
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    for file in folder.glob(SHARD_NAME.format(0).replace("00000", "*")):
        if file.name not in listed:
            file.unlink()
