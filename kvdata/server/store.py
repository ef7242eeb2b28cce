"""The chunks a server holds: reservations, read locks, recency.

A chunk is first reserved (memory, but not readable), then published. The first writer wins. Readers hold
anonymous counted locks that expire together; a locked chunk is never evicted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import torch

from kvdata.server.pool import Pool
from kvdata.wire.messages import Slot

ObjectKey = tuple[bytes, str, int, str]  # chunk hash, model name, kv rank, salt


@dataclass(slots=True, eq=False)
class Chunk:
    """One stored object. ``deadline`` ends the reservation, or (once ready) all read locks."""

    slot: Slot
    deadline: float
    ready: bool = False
    locks: int = 0


Reservation = tuple[ObjectKey, Chunk]


@dataclass(eq=False)
class ChunkStore:
    """Chunks by key, least recently used first.

    Whoever touches a chunk touches its whole prefix, later chunks first. So a chunk is never more recent than
    the ones before it, eviction takes the ends of prefixes, and what can still be hit stays contiguous.

    Args:
        pool: where the bytes lie.
        clock: seconds, monotonic.
        write_ttl, read_ttl: seconds until a reservation, or the read locks of a chunk, expire.
        watermark, eviction_ratio: once this fraction of the pool is taken, this fraction of the chunks goes.
    """

    pool: Pool
    clock: Callable[[], float]
    write_ttl: float
    read_ttl: float
    watermark: float
    eviction_ratio: float
    written: Counter[str] = field(default_factory=Counter)  # chunks, by salt, like the next two
    read: Counter[str] = field(default_factory=Counter)
    evicted: Counter[str] = field(default_factory=Counter)
    _chunks: OrderedDict[ObjectKey, Chunk] = field(default_factory=OrderedDict)

    def find(self, key: ObjectKey) -> Chunk | None:
        """The readable chunk of that key."""
        chunk = self._chunks.get(key)
        return chunk if chunk is not None and chunk.ready else None

    def tensor(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's memory, in its shape."""
        dtype: torch.dtype = getattr(torch, chunk.slot.dtype)
        return self.pool.memory.narrow(0, chunk.slot.offset, chunk.slot.length).view(dtype).view(chunk.slot.shape)

    def locks(self, key: ObjectKey) -> int:
        """Unexpired read locks of the readable chunk of that key, else 0."""
        chunk = self.find(key)
        if chunk is not None and chunk.locks and self.clock() >= chunk.deadline:
            chunk.locks = 0
        return chunk.locks if chunk is not None else 0

    def lock(self, keys: Iterable[ObjectKey], count: int) -> None:
        """Add ``count`` locks to each readable chunk and renew the expiry of all its locks."""
        for key in keys:
            held, chunk = self.locks(key), self.find(key)
            if chunk is not None:
                chunk.locks, chunk.deadline = held + count, self.clock() + self.read_ttl

    def unlock(self, keys: Iterable[ObjectKey], count: int = 1) -> None:
        """Release up to ``count`` locks of each chunk, whoever took them.

        This is what LMCache counts as a read: one per chunk that had a lock, whatever the reason.
        """
        for key in keys:
            held, chunk = self.locks(key), self.find(key)
            if held and chunk is not None:
                chunk.locks = max(0, held - count)
                self.read[key[3]] += 1

    def reserve(self, keys: Sequence[ObjectKey], slot: Slot) -> dict[int, Reservation]:
        """Reserve memory shaped like ``slot`` for each absent key: for all of them, or for none.

        Returns the reservations by index into ``keys``.
        """
        missing = [i for i, key in enumerate(keys) if not self._is_held(key)]
        offsets = self.pool.allocate(slot.length, len(missing))
        if offsets is None:
            return {}
        deadline = self.clock() + self.write_ttl
        reserved = {}
        for i, offset in zip(missing, offsets, strict=True):
            chunk = Chunk(msgspec.structs.replace(slot, offset=offset), deadline)
            self._chunks[keys[i]] = chunk
            reserved[i] = (keys[i], chunk)
        return reserved

    def _is_held(self, key: ObjectKey) -> bool:
        chunk = self._chunks.get(key)
        if chunk is not None and not chunk.ready and self.clock() >= chunk.deadline:
            self._remove(key)
            return False
        return chunk is not None

    def publish(self, reserved: Iterable[Reservation]) -> None:
        """Make reservations readable; those expired, aborted or handed to another writer are passed over."""
        for key, chunk in reserved:
            if self._is_held(key) and self._chunks[key] is chunk and not chunk.ready:
                chunk.ready = True
                self.written[key[3]] += 1

    def gone(self, reserved: Iterable[Reservation]) -> bool:
        """Whether all of these reservations would have ended a whole `write_ttl` ago."""
        return all(self.clock() >= chunk.deadline + self.write_ttl for _, chunk in reserved)

    def discard(self, reserved: Iterable[Reservation]) -> None:
        """Give up reservations that were not published."""
        for key, chunk in reserved:
            if self._chunks.get(key) is chunk and not chunk.ready:
                self._remove(key)

    def touch(self, prefix: Sequence[ObjectKey]) -> None:
        """Mark a prefix, first chunk first, as just used."""
        for key in reversed(prefix):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def delete(self, keys: Iterable[ObjectKey], force: bool) -> tuple[int, int]:
        """Remove chunks and reservations, without ``force`` only unlocked ones; (deleted, skipped)."""
        deleted = skipped = 0
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                continue
            if not force and (not chunk.ready or self.locks(key)):
                skipped += 1
                continue
            self.evicted[key[3]] += chunk.ready
            self._remove(key)
            deleted += 1
        return deleted, skipped

    def clear(self, force: bool) -> None:
        """`delete` everything."""
        self.delete(list(self._chunks), force)

    def _remove(self, key: ObjectKey) -> None:
        self.pool.release(self._chunks.pop(key).slot.offset)

    def tick(self) -> None:
        """Drop expired reservations (what their writer left is never readable), then evict if need be."""
        for key in list(self._chunks):
            self._is_held(key)
        if self.pool.used >= self.watermark * self.pool.size:
            idle = (key for key, chunk in self._chunks.items() if chunk.ready and not self.locks(key))
            self.delete(list(islice(idle, max(1, int(self.eviction_ratio * len(self._chunks))))), force=False)

    def status(self) -> dict[str, float]:
        """The counts of ``storage_manager.l1_manager`` in ``/status``; sizes in bytes, times in seconds."""
        staged = [chunk.slot.length for chunk in self._chunks.values() if not chunk.ready]
        return {
            "total_object_count": len(self._chunks),
            "write_locked_count": len(staged),
            "read_locked_count": sum(self.locks(key) > 0 for key in self._chunks),
            "temporary_count": 0,
            "staging_object_count": len(staged),
            "staging_bytes": sum(staged),
            "memory_used_bytes": self.pool.used,
            "memory_total_bytes": self.pool.size,
            "memory_usage_ratio": self.pool.used / self.pool.size,
            "write_ttl_seconds": self.write_ttl,
            "read_ttl_seconds": self.read_ttl,
        }
