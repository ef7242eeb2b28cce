"""`KVCacheWriter`: stores the caches that a LightningModule puts out, and loses none silently."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import lightning as L
except ImportError as missing:
    raise ImportError("kvdata.lightning needs lightning: pip install 'kvdata[train]'") from missing

from kvdata.client.connection import Connection
from kvdata.client.deadline import Deadline
from kvdata.errors import InvalidRequest, KVCacheSDKError, StoreFailed
from kvdata.lightning.cache_write import CacheWrite, WriteCounts
from kvdata.lightning.manifest_part import ManifestPart, commit
from kvdata.lightning.ranks import agree, total
from kvdata.lightning.writing_thread import WritingThread

log = logging.getLogger("kvdata")

_STAGES = ("train", "validation", "test", "predict")


class KVCacheWriter(L.Callback):
    """Lightning callback that stores each `CacheWrite` in a module's outputs through its own context.

    A step returns them as a list, or as ``{"cache_writes": [...], ...}``. A thread stores them while the next batch is
    computed. What failed is raised at the rank's next batch, at the latest at the end of the stage, on every rank
    then, as a `StoreFailed` that names the rank. A cache that comes twice, after a retry or because a
    ``DistributedSampler`` pads, is written and listed once; other content under the same address is a `StoreConflict`.

    A checkpoint implies that all that was put out before it is stored, on every rank (not one of
    ``save_weights_only``, for which Lightning asks no callback).

    After an exception elsewhere the rest is stored, within ``drain_seconds``, and failures are logged, so that the
    first error stays the one that is seen. The parts of the manifest then stay beside it, and the next run with this
    manifest takes them in (see `kvdata.lightning.manifest_part`).

    The sanity check and ``fast_dev_run`` store and write nothing.

    Args:
        connection: the server and model to write to.
        manifest: JSONL file, read with `kvdata.datasets.Manifest`: one line for each stored cache with its source,
            address, policy and size, beside those that were in it before. It is written once all ranks are done with
            a stage, in a folder that they share.
        stages: which steps' outputs are looked at: ``train``, ``validation``, ``test``, ``predict``.
        max_pending_bytes: caches that are waiting or being stored, before a batch has to wait; one larger than this
            passes alone.
        drain_seconds: how long a batch may wait for room, and a checkpoint or the end of a stage for the rest.
        verify_every: of every so many caches one, the first, is read back at the next checkpoint or end of a stage
            and compared bit for bit; 0 for none.
        retries: how often a store that the server did not answer is tried again, after 1, 2, 4, 8, 8 .. s and within
            ``drain_seconds``, before it has failed. A server that has restarted meanwhile gets again what it has lost
            of the last ``max_pending_bytes`` that were stored: these are kept in memory.
    """

    def __init__(
        self,
        connection: Connection,
        manifest: str | Path | None = None,
        stages: Sequence[str] = ("test", "predict"),
        max_pending_bytes: int = 1 << 30,
        drain_seconds: float = 300.0,
        verify_every: int = 16,
        retries: int = 0,
    ) -> None:
        unknown = set(stages) - set(_STAGES)
        if unknown:
            raise InvalidRequest(f"unknown stages: {', '.join(sorted(unknown))}; known: {', '.join(_STAGES)}")
        if max_pending_bytes < 1 or not drain_seconds > 0 or verify_every < 0 or retries < 0:
            raise InvalidRequest(
                "max_pending_bytes and drain_seconds must be positive, verify_every and retries at least 0, got "
                f"{max_pending_bytes}, {drain_seconds}, {verify_every} and {retries}"
            )
        self.connection = connection
        self.manifest = Path(manifest) if manifest is not None else None
        self.stages = frozenset(stages)
        self.max_pending_bytes = max_pending_bytes
        self.drain_seconds = drain_seconds
        self.verify_every = verify_every
        self.retries = retries
        self.counts = WriteCounts()
        self._rank, self._ranks = 0, 1
        self._thread: WritingThread | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._rank, self._ranks = trainer.global_rank, trainer.world_size

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
        if trainer.sanity_checking or trainer.fast_dev_run:
            return
        self._raise_failure()
        writes = outputs.get("cache_writes", []) if isinstance(outputs, Mapping) else outputs
        for write in writes if stage in self.stages and isinstance(writes, (list, tuple)) else []:
            if isinstance(write, CacheWrite):
                self.submit(write)

    def submit(self, write: CacheWrite) -> None:
        """Queue one cache; waits while `max_pending_bytes` are queued. Raises what earlier stores failed with."""
        if self._thread is None:
            part = ManifestPart(self.manifest, self._rank) if self.manifest is not None else None
            limits = (self.max_pending_bytes, self.verify_every, self.retries, self.drain_seconds)
            self._thread = WritingThread(self.connection, part, self.counts, *limits)
        self._raise_failure()
        self._thread.put(write, self.drain_seconds)

    def _raise_failure(self) -> None:
        if self._thread is not None and (error := self._thread.failure()) is not None:
            raise error

    # -- the ends of stages -------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until everything queued is stored; raises `StoreFailed` if anything was not.

        With one rank the manifest is committed. With several, call it where you like, but the manifest is committed at
        the end of the stage.
        """
        error, written = self._end()
        if error is not None:
            raise error
        if self.manifest is not None and self._ranks == 1:
            commit(self.manifest, written)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.fast_dev_run:
            return
        if self._thread is not None:
            self._thread.settle(self.drain_seconds)
        error = self._thread.failure() if self._thread is not None else None
        if not trainer.interrupted:
            agree(trainer, error)
        elif error is not None:  # a checkpoint saved because of an exception: the other ranks may be gone
            log.error("KVCacheWriter, saving a checkpoint after an exception: %s", error)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._finish(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking and ("validation" in self.stages or trainer.state.fn == "validate"):
            self._finish(trainer)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._finish(trainer)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        self._finish(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # Lightning calls nothing else after an error, and raising here would hide it.
        error, _ = self._end()
        if error is not None:
            log.error("KVCacheWriter, while handling %s: %s", type(exception).__name__, error)

    def _finish(self, trainer: Any) -> None:
        """Store the rest, and commit the manifest once all ranks have: raises on all of them if one did not."""
        if trainer.fast_dev_run:
            return
        error, written = self._end()
        agree(trainer, error)
        if self.manifest is not None:
            everything = total(trainer, written)
            agree(trainer, self._committed(self.manifest, everything) if trainer.is_global_zero else None)

    def _committed(self, manifest: Path, written: int) -> StoreFailed | None:
        """Commit; what went wrong is for all ranks to hear."""
        try:
            commit(manifest, written)
        except KVCacheSDKError as exc:
            error = StoreFailed(str(exc))
            error.__cause__ = exc
            return error
        return None

    def _end(self) -> tuple[StoreFailed | None, int]:
        """Store the rest and end the thread: what failed, and how many bytes the manifest's part has."""
        thread, self._thread = self._thread, None
        if thread is None:
            return None, 0
        deadline = Deadline(self.drain_seconds)
        thread.settle(deadline.remaining())
        thread.close(deadline.remaining())
        return thread.failure(), thread.part.size if thread.part is not None else 0
