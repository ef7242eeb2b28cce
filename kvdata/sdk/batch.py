"""`LMCacheBatchedStream`: the same phase for many streams at once."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvdata.errors import InvalidRequest
from kvdata.sdk.metrics import Metrics
from kvdata.sdk.stream import DerivedEdit, EditFunction, LMCacheStream, Usage


class LMCacheBatchedStream:
    """Streams that are prefilled, modified and decoded together.

    A stream that fails keeps its error in `LMCacheStream.error` and in the report, and takes no part in later
    phases; the others go on. A phase raises only when no stream is left, with the error of the first.

    Args:
        max_concurrency: requests at the engine at a time; the others wait. Within it, the engine does the batching.
        max_edits: caches in memory at a time while modifying. They are retrieved concurrently, but edited and
            stored one after the other: an edit function is never called by two threads at once.
        settle_seconds: how long `modify` waits for caches that the engine is still storing.
    """

    def __init__(self, max_concurrency: int = 64, max_edits: int = 2, settle_seconds: float = 10.0) -> None:
        if max_concurrency < 1 or max_edits < 1:
            raise InvalidRequest("max_concurrency and max_edits must be at least 1")
        self.streams: list[LMCacheStream] = []
        self._max_concurrency, self._max_edits = max_concurrency, max_edits
        self._settle_seconds = settle_seconds

    def add(self, stream: LMCacheStream) -> None:
        """Add a stream; its number in reports is its place in `streams`."""
        if any(stream is other for other in self.streams):
            raise InvalidRequest("this stream is already in the batch")
        self.streams.append(stream)

    def prefill(self, sampling_params: Mapping[str, Any] | None = None) -> Metrics:
        """Send every prompt once, for one token, so that the engine computes and stores its cache.

        That token belongs to the stream's output. ``max_tokens`` is forced to 1 and ``min_tokens`` dropped.
        """
        params = {**(sampling_params or {}), "max_tokens": 1}
        params.pop("min_tokens", None)
        return self._run("prefill", self._max_concurrency, lambda stream: stream.generate(params))

    def modify(self, fn: EditFunction | DerivedEdit) -> Metrics:
        """Apply an edit to the chunk-aligned part of every stream's cache and store the results.

        Args:
            fn: ``fn(kv, tokens) -> (kv, tokens)`` with ``kv`` ``[2, L, T, D]``. The result is stored under the
                stream's own salt; what does not fill a chunk is sent as tokens again. The edits of
                `kvdata.edits.functions` bring a salt of their own, which the stream then uses.

        A stream's error is a `StoreConflict` when the server already held another cache under the new address,
        so that the edit would have been lost.
        """
        lock = threading.Lock()
        return self._run("modify", self._max_edits, lambda stream: stream.modify(fn, self._settle_seconds, lock))

    def decode(self, sampling_params: Mapping[str, Any] | None = None) -> Metrics:
        """Generate from every stream's cache. Its throughput is all tokens over the time of this call."""
        params = dict(sampling_params or {})
        return self._run("decode", self._max_concurrency, lambda stream: stream.generate(params))

    def _run(self, phase: str, bound: int, action: Callable[[LMCacheStream], Usage]) -> Metrics:
        if not self.streams:
            raise InvalidRequest(f"{phase}: the batch has no streams; add some first")

        def guarded(stream: LMCacheStream) -> Usage | None:
            try:
                return action(stream)
            except Exception as exc:
                # The error lives as long as the stream; the caches in its frames must not.
                traceback.clear_frames(exc.__traceback__)
                stream.error = exc
                return None

        live = [stream for stream in self.streams if stream.error is None]
        start = time.perf_counter()
        with ThreadPoolExecutor(bound, thread_name_prefix=f"kvdata-{phase}") as pool:
            try:
                usages = [usage for usage in pool.map(guarded, live) if usage is not None]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        duration = time.perf_counter() - start
        errors = {number: stream.error for number, stream in enumerate(self.streams) if stream.error is not None}
        if not usages:
            raise next(iter(errors.values()))
        return Metrics(
            phase,
            len(usages),
            duration,
            sum(usage.input_tokens for usage in usages),
            sum(usage.output_tokens for usage in usages),
            errors,
        )
