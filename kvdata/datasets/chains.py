"""`Chains`: KV events in, whole prefixes out. No server and no clock in here.

A chunk knows the chunk before it by its hash. One whose ancestors are all known, down to the first chunk of a
sequence, ends a prefix; while it has no successor it is a leaf. Leaves that stay leaves for a settle time are
given out, once.

A ``removed`` event does not name a salt: another tenant's copy of the same tokens may be meant, and chunks that
many prompts begin with would be lost to all of them. So it is taken for a hint (that chunk is forgotten first),
and whoever retrieves the prefix finds out.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

import numpy as np

from kvdata.errors import InvalidRequest, ProtocolError
from kvdata.wire.keys import NONE_HASH, chunk_hash, packed
from kvdata.wire.messages import KVEvent, KVEventBatch

_REMEMBERED = 1_000_000  # prefixes given out that are not given out again, about 100 MB


@dataclass
class ChainCounts:
    """What became of the events of a stream.

    Attributes:
        events: all that came.
        repeated: ``stored`` events of chunks that were known: stored again, or once for each worker of an engine.
        removed: chunks named by ``removed`` events.
        lost: markers of the server that it could not deliver some events (its log was overrun).
        missed: sequence numbers passed over at these markers: at most so many events, of all models.
        incarnations: restarts of the server, at each of which all chunks were forgotten.
        waiting: chunks held now of which an earlier one is not known (yet).
        unrooted: chunks whose event named no parent, or a wrong one, so that they can never be placed.
        dropped: prefixes forgotten before they had settled, and chunks forgotten while they waited: for the memory
            bound, or at a restart.
    """

    events: int = 0
    repeated: int = 0
    removed: int = 0
    lost: int = 0
    missed: int = 0
    incarnations: int = 0
    waiting: int = 0
    unrooted: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _Chunk:
    parent: bytes
    encoded: bytes = field(repr=False)  # token ids, 4-byte big-endian unsigned as they are hashed
    length: int = 0  # tokens of the prefix that ends here; 0 while an ancestor is unknown


class Chains:
    """Rebuilds prefixes from one model's KV events.

    Args:
        settle_seconds: how long a chunk must have had no successor before its prefix is given out.
        max_chunks: chunks kept at most (4 bytes a token and about 600 a chunk). Beyond, ends of chains go, the ones
            that came first before others; a chunk that others follow is kept.
        counts: goes on with these counters.
    """

    def __init__(self, settle_seconds: float, max_chunks: int, counts: ChainCounts | None = None) -> None:
        if settle_seconds < 0 or max_chunks < 1:
            raise InvalidRequest("settle_seconds must not be negative, and max_chunks at least 1")
        self.counts = ChainCounts() if counts is None else counts
        self._settle = settle_seconds
        self._max_chunks = max_chunks
        self._incarnation: int | None = None
        self._cursor = 0
        self._given: OrderedDict[int, None] = OrderedDict()
        self._due: OrderedDict[bytes, float] = OrderedDict()  # leaves not given out yet, by when they settle
        self.counts.waiting = 0
        self._forget_all()

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, batch: KVEventBatch, now: float) -> None:
        """Take in a batch that came at ``now`` (seconds of any clock that does not go back).

        Raises `ProtocolError` for a ``stored`` event that is not about one chunk, or of ids that are none.
        """
        if batch.incarnation != self._incarnation:
            self.counts.incarnations += self._incarnation is not None
            self._incarnation, self._cursor = batch.incarnation, 0
            self._forget_all()
        if batch.lost:
            self.counts.lost += 1
            self.counts.missed += max(0, batch.next_cursor - self._cursor - len(batch.events))
        self._cursor = batch.next_cursor
        self.counts.events += len(batch.events)
        for event in batch.events:
            if event.kind == "stored":
                self._stored(event, now)
            elif event.kind == "removed":
                self._removed(event)

    def next_due(self) -> float | None:
        """When the next leaf will have settled; None when there is none."""
        return next(iter(self._due.values()), None)

    def settled(self, now: float) -> bytes | None:
        """Hash of the last chunk of a prefix that has settled, each once; None when there is none now."""
        due = self.next_due()
        if due is None or due > now:
            return None
        digest, _ = self._due.popitem(last=False)
        self._given[_short(digest)] = None
        if len(self._given) > _REMEMBERED:
            self._given.popitem(last=False)
        return digest

    def length(self, digest: bytes) -> int:
        """Tokens of the prefix that ends with a chunk which `settled` has just named."""
        return self._chunks[digest].length

    def tokens(self, digest: bytes) -> np.ndarray:
        """Its token ids: ``[T]`` int64."""
        parts: list[bytes] = []
        while digest != NONE_HASH:
            parts.append(self._chunks[digest].encoded)
            digest = self._chunks[digest].parent
        return np.frombuffer(b"".join(reversed(parts)), dtype=">u4").astype(np.int64)

    def again(self, digest: bytes) -> None:
        """Its cache was gone: the prefix is given out when its last chunk is stored again."""
        self._given.pop(_short(digest), None)

    def _stored(self, event: KVEvent, now: float) -> None:
        if len(event.block_hashes) != 1:
            raise ProtocolError(f"a 'stored' event names {len(event.block_hashes)} chunks; kvdata knows events of one")
        digest = event.block_hashes[0]
        if digest in self._chunks:
            self.counts.repeated += 1
            self._seen_again(digest, now)
            return
        parent = event.parent_block_hash or NONE_HASH
        try:
            encoded = packed(event.token_ids)
        except InvalidRequest as exc:
            raise ProtocolError(f"a 'stored' event is wrong: {exc}") from exc
        if chunk_hash(parent, encoded) != digest:
            self.counts.unrooted += 1
            return
        self._chunks[digest] = _Chunk(parent, encoded)
        self._followers[parent].add(digest)
        self._ends.pop(parent, None)
        if digest not in self._followers:
            self._ends[digest] = None
        self.counts.waiting += 1
        if parent == NONE_HASH or (parent in self._chunks and self._chunks[parent].length):
            self._due.pop(parent, None)
            self._root(digest, now)
        while len(self._chunks) > self._max_chunks:
            self._forget(next(iter(self._ends)))

    def _root(self, digest: bytes, now: float) -> None:
        """All ancestors of a chunk are known now: and so are those of the chunks that waited for it."""
        reached = [digest]
        while reached:
            digest = reached.pop()
            chunk = self._chunks[digest]
            before = 0 if chunk.parent == NONE_HASH else self._chunks[chunk.parent].length
            chunk.length = before + len(chunk.encoded) // 4
            self.counts.waiting -= 1
            if digest in self._followers:
                reached += self._followers[digest]
            else:
                self._schedule(digest, now)

    def _schedule(self, digest: bytes, now: float) -> None:
        if _short(digest) not in self._given:
            self._due.setdefault(digest, now + self._settle)

    def _seen_again(self, digest: bytes, now: float) -> None:
        if digest in self._ends:
            self._ends.move_to_end(digest)
            if self._chunks[digest].length:
                self._schedule(digest, now)

    def _removed(self, event: KVEvent) -> None:
        self.counts.removed += len(event.block_hashes)
        for digest in event.block_hashes:
            if digest in self._ends:
                self._ends.move_to_end(digest, last=False)

    def _forget(self, digest: bytes) -> None:
        """Drop a chunk that nothing follows; the one before it is an end then, and older than the others."""
        chunk = self._chunks.pop(digest)
        del self._ends[digest]
        self.counts.waiting -= not chunk.length
        self.counts.dropped += self._due.pop(digest, None) is not None or not chunk.length
        siblings = self._followers[chunk.parent]
        siblings.discard(digest)
        if not siblings:
            del self._followers[chunk.parent]
            if chunk.parent in self._chunks:
                self._ends[chunk.parent] = None
                self._ends.move_to_end(chunk.parent, last=False)

    def _forget_all(self) -> None:
        self.counts.dropped += self.counts.waiting + len(self._due)
        self.counts.waiting = 0
        self._due.clear()
        self._chunks: dict[bytes, _Chunk] = {}
        self._followers: defaultdict[bytes, set[bytes]] = defaultdict(set)
        self._ends: OrderedDict[bytes, None] = OrderedDict()  # nothing follows them; first to be forgotten first


def _short(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
