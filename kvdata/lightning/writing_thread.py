"""The thread that stores compressed caches while the next batch is computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvdata.client.connection import Connection
from kvdata.client.context import KVCacheContext
from kvdata.datasets.retry import TRANSIENT, end_retries_with, with_retries
from kvdata.errors import StoreFailed
from kvdata.lightning.cache_store import CacheStore
from kvdata.lightning.cache_write import CacheWrite, WriteCounts
from kvdata.lightning.kept import Kept
from kvdata.lightning.manifest_part import ManifestPart
from kvdata.lightning.pending import Pending


class WritingThread:
    """Stores caches through a context of its own, and keeps what failed until it is asked for.

    Once the server has not answered, also not the last of the retries, what follows is given up unsent, until `failure`
    was called: a dead server is heard of after one time-out, and not after one for each cache.

    Args:
        connection: the server and model to write to.
        part: where stored caches are listed; closed with the thread.
        counts: are added to.
        max_pending_bytes: of the caches that are waiting or being stored.
        verify_every: of every so many caches one, the first, is read back by `settle`; 0 for none.
        retries: as in `kvdata.datasets.retry.with_retries`. With them the last ``max_pending_bytes`` of what was stored
            are kept, and stored again when a server that was away has lost them.
        retry_seconds: after which no try begins any more.
    """

    def __init__(
        self,
        connection: Connection,
        part: ManifestPart | None,
        counts: WriteCounts,
        max_pending_bytes: int,
        verify_every: int,
        retries: int,
        retry_seconds: float,
    ) -> None:
        self.part = part
        self._connection, self._counts, self._verify_every = connection, counts, verify_every
        self._retries, self._retry_seconds = retries, retry_seconds
        self._kept = Kept(max_pending_bytes) if retries else None
        self._closing = threading.Event()
        self._pending: Pending[CacheWrite | None] = Pending(max_pending_bytes)
        self._failures: list[Exception] = []
        self._unanswered = False
        self._lock = threading.Lock()  # of the two before
        self._thread = threading.Thread(target=self._run, name="kvdata-writer", daemon=True)
        self._thread.start()

    def put(self, write: CacheWrite, seconds: float) -> None:
        """Queue one cache; `StoreFailed` when there is no room for it within ``seconds``."""
        write = replace(write, kv=write.kv.detach())  # a training step's graph must not wait with it
        if self._pending.put(write, write.nbytes, 0):
            return
        started = time.monotonic()
        queued = self._pending.put(write, write.nbytes, seconds)
        self._counts.wait_seconds += time.monotonic() - started
        if not queued:
            raise StoreFailed(f"no cache could be stored for {seconds:g} s; is the server alive?")

    def settle(self, seconds: float) -> None:
        """Wait until all is stored and listed on disk, and the sample is read back; `failure` tells how it went.

        What is still queued after ``seconds`` is given up.
        """
        self._pending.put(None, 0, seconds)
        if not self._pending.wait_done(seconds):
            left = sum(write is not None for write in self._pending.drop())
            self._latch(
                StoreFailed(
                    f"after {seconds:g} s one cache was still being stored or read back, and {left} were waiting and "
                    "are given up; is the server alive? drain_seconds= is the time allowed"
                ),
                failed=left,
            )

    def failure(self) -> StoreFailed | None:
        """What failed since this was last called, as one error of the first one's kind."""
        with self._lock:
            failures, self._failures, self._unanswered = self._failures, [], False
        if not failures:
            return None
        first = failures[0]
        kind = type(first) if isinstance(first, StoreFailed) else StoreFailed
        more = f"; and {len(failures) - 1} more" if len(failures) > 1 else ""
        error = kind(f"storing compressed caches failed: {first}{more}")
        error.__cause__ = first
        return error

    def close(self, seconds: float) -> None:
        """End the thread, which takes no longer than the try that it is at."""
        self._pending.close()
        self._closing.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        ctx = KVCacheContext(self._connection)
        store = CacheStore(ctx, self.part, self._counts, self._verify_every, self._kept)
        end_retries_with(self._closing)
        try:
            self._pending.consume(partial(self._work, store))
        finally:
            ctx.close()
            if self.part is not None:
                self.part.close()

    def _work(self, store: CacheStore, write: CacheWrite | None) -> None:
        """Store a cache; None asks for what `settle` promises."""
        if not self._unanswered:
            self._attempt(store.restore, failed=0)
        if write is not None:
            self._attempt(partial(store.store, write))
            return
        if self.part is not None:
            self._attempt(self.part.sync, failed=0)
        for address, digest in store.samples():
            self._attempt(partial(store.verify, address, digest))

    def _attempt(self, action: Callable[[], None], failed: int = 1) -> None:
        if self._unanswered and failed:
            self._latch(StoreFailed("given up, since the server did not answer before"))
            return
        try:
            with_retries(action, self._retries, self._count_retry, seconds=self._retry_seconds)
        except Exception as exc:  # the training thread raises it
            self._latch(exc, failed)

    def _count_retry(self) -> None:
        self._counts.retries += 1

    def _latch(self, error: Exception, failed: int = 1) -> None:
        with self._lock:
            self._failures.append(error)
            self._unanswered |= isinstance(error, TRANSIENT)
            self._counts.failed += failed
