"""`KVCacheWriter`: stores the caches that a LightningModule puts out, and loses none silently."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

try:
    import lightning as L
except ImportError as missing:
    raise ImportError("kvdata.lightning needs lightning: pip install 'kvdata[train]'") from missing

from kvdata.client.connection import Connection
from kvdata.client.context import KVCacheContext
from kvdata.edits.address import compressed_address, source_digest
from kvdata.errors import InvalidRequest, KVCacheSDKError, StoreConflict, StoreFailed

log = logging.getLogger("kvdata")


@dataclass(frozen=True)
class CacheWrite:
    """One compressed cache to be stored.

    Attributes:
        kv: ``[2, L, T', D]``, ``T'`` a whole number of chunks.
        source_tokens: token ids of the whole prefix it was made from.
        policy: what made it, e.g. ``"keydiff"``; part of the salt.
        revision: changes with the policy's weights; part of the salt.
        prefix: salt of the source's own cache, which starts the derived one.
        meta: labels for the manifest.
    """

    kv: torch.Tensor
    source_tokens: Sequence[int]
    policy: str
    revision: str = "r1"
    prefix: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    def address(self) -> tuple[list[int], str]:
        """Token ids and salt under which it is stored and an engine finds it."""
        tokens, salt = compressed_address(
            self.source_tokens, self.kv.shape[2], self.policy, revision=self.revision, prefix=self.prefix
        )
        return list(tokens), salt


@dataclass
class WriteCounts:
    """What became of the writes handed over so far."""

    stored: int = 0
    deduplicated: int = 0
    failed: int = 0
    chunks: int = 0
    bytes: int = 0


class KVCacheWriter(L.Callback):
    """Lightning callback that stores each `CacheWrite` in a module's outputs through its own context.

    A step returns them as a list, or as ``{"cache_writes": [...], ...}``. One thread stores them while the next
    batch is computed. A failed store is raised at the next batch, at the latest at the end of the stage; after
    an exception elsewhere the rest is written (with a deadline) and failures are logged, so that the first
    error stays the one that is seen.

    Args:
        connection: the server and model to write to.
        manifest: JSONL file, appended to: one line per stored cache with its source, address, policy and size.
        stages: which steps' outputs are looked at: ``train``, ``validation``, ``test``, ``predict``.
        max_pending: caches waiting to be stored before a batch has to wait.
        drain_seconds: how long flushing may take at the end of a stage.
    """

    def __init__(
        self,
        connection: Connection,
        manifest: str | Path | None = None,
        stages: Iterable[str] = ("test", "predict"),
        max_pending: int = 32,
        drain_seconds: float = 300.0,
    ) -> None:
        self.connection = connection
        self.manifest = Path(manifest) if manifest is not None else None
        self.stages = frozenset(stages)
        unknown = self.stages - {"train", "validation", "test", "predict"}
        if unknown:
            raise InvalidRequest(f"unknown stages: {', '.join(sorted(unknown))}")
        self.max_pending = max_pending
        self.drain_seconds = drain_seconds
        self.counts = WriteCounts()
        self._worker: _Worker | None = None

    # -- taking -------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._take("train", trainer, outputs)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._take("validation", trainer, outputs)

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._take("test", trainer, outputs)

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._take("predict", trainer, outputs)

    def _take(self, stage: str, trainer: Any, outputs: Any) -> None:
        if stage not in self.stages or trainer.sanity_checking:
            return
        writes = outputs.get("cache_writes", []) if isinstance(outputs, Mapping) else outputs
        for write in writes if isinstance(writes, (list, tuple)) else []:
            if isinstance(write, CacheWrite):
                self.submit(write)

    def submit(self, write: CacheWrite) -> None:
        """Queue one cache; waits while `max_pending` are queued. Raises what earlier stores failed with."""
        if self._worker is None:
            self._worker = _Worker(self.connection, self.manifest, self.counts, self.max_pending)
        self._worker.raise_failure()
        self._worker.put(write, self.drain_seconds)

    # -- flushing -----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until everything queued is stored; raises `StoreFailed` if anything was not."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.finish(self.drain_seconds)
            worker.raise_failure()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.flush()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.flush()

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self.flush()

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        self.flush()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # Lightning calls nothing else after an error, and raising here would hide it.
        try:
            self.flush()
        except KVCacheSDKError as exc:
            log.error("KVCacheWriter, while handling %s: %s", type(exception).__name__, exc)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.flush()


class _Worker:
    """The storing thread with its queue, context and manifest."""

    def __init__(self, connection: Connection, manifest: Path | None, counts: WriteCounts, pending: int) -> None:
        self._queue: queue.Queue[CacheWrite | None] = queue.Queue(pending)
        self._connection = connection
        self._manifest = _open_manifest(manifest)
        self._counts = counts
        self._failures: list[Exception] = []
        self._thread = threading.Thread(target=self._run, name="kvdata-writer", daemon=True)
        self._thread.start()

    def put(self, write: CacheWrite, seconds: float) -> None:
        try:
            self._queue.put(write, timeout=seconds)
        except queue.Full as exc:
            raise StoreFailed(f"no cache could be stored for {seconds:g} s; is the server alive?") from exc

    def finish(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            pass
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            left = self._queue.qsize()
            self._counts.failed += left
            self._failures.append(StoreFailed(f"{left} caches were not stored within {seconds:g} s"))

    def raise_failure(self) -> None:
        if self._failures:
            failures, self._failures = self._failures, []
            raise StoreFailed(
                f"{len(failures)} compressed caches were not stored; the first: {failures[0]}"
            ) from failures[0]

    def _run(self) -> None:
        ctx = KVCacheContext(self._connection)
        try:
            while (write := self._queue.get()) is not None:
                try:
                    self._store(ctx, write)
                except Exception as exc:  # latched: the training thread raises it
                    self._counts.failed += 1
                    self._failures.append(exc)
        finally:
            ctx.close()
            if self._manifest is not None:
                self._manifest.close()

    def _store(self, ctx: KVCacheContext, write: CacheWrite) -> None:
        tokens, salt = write.address()
        if len(tokens) % ctx.chunk_size:
            raise InvalidRequest(f"{len(tokens)} kept tokens are not whole chunks of {ctx.chunk_size}")
        kv = write.kv.detach().to("cpu", ctx.layout.dtype)
        new = ctx.store(kv, tokens, salt)
        report = ctx.last_store
        assert report is not None
        if report.deduplicated and not _equal(ctx.retrieve(tokens, salt), kv):
            raise StoreConflict(
                f"salt {salt!r} holds another cache of the same source; give the new weights a new revision="
            )
        self._counts.stored += new
        self._counts.deduplicated += not new
        self._counts.chunks += report.stored
        self._counts.bytes += report.bytes
        if self._manifest is not None:
            entry = {
                "source": source_digest(write.source_tokens),
                "source_tokens": len(write.source_tokens),
                "tokens": tokens,
                "salt": salt,
                "policy": write.policy,
                "revision": write.revision,
                "bytes": kv.numel() * kv.element_size(),
                "result": "stored" if new else "deduplicated",
                "meta": dict(write.meta),
            }
            self._manifest.write(json.dumps(entry) + "\n")
            self._manifest.flush()


def _open_manifest(path: Path | None) -> IO[str] | None:
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "a", encoding="utf-8")


def _equal(found: torch.Tensor | None, kv: torch.Tensor) -> bool:
    return found is not None and found.shape == kv.shape and torch.equal(found, kv)
