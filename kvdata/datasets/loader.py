"""`KVLoader`: batches read by threads of this process, ahead of the consumer, into buffers that are used again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvdata.datasets.base import CacheDataset
from kvdata.datasets.buffers import Buffers
from kvdata.datasets.collate import collate
from kvdata.datasets.retry import end_retries_with
from kvdata.datasets.sample import Sample
from kvdata.datasets.samplers import KVBatchSampler, Resumable
from kvdata.errors import InvalidRequest

_CHECK_SECONDS = 5.0


class KVLoader(Resumable):
    """Takes a ``DataLoader``'s place, without worker processes: the copies leave Python's lock to others.

    Batches come in the sampler's order, whatever thread read them. A batch is valid for as long as anybody holds it or
    a part of it; its buffer is used again after that, so drop batches to stay within ``prefetch + 2`` of them.

    Args:
        dataset: of caches.
        batch_size: samples in a batch, on each rank.
        shuffle: a new order in each epoch, by ``seed`` alone: the same on any number of threads and ranks.
        sampler: makes the batches of indices instead; excludes the four before and after.
        drop_last: leave an incomplete last batch out.
        max_tokens: batches of like lengths, of at most so many tokens (padding counts), instead of ``batch_size``.
        seed: of the shuffle.
        collate_fn: samples -> batch.
        threads: that read batches.
        prefetch: batches that are read ahead.
        prefetch_bytes: memory for batches that are read ahead; one is always allowed.
        pinned: page-locked buffers; by default where there is a GPU.
    """

    def __init__(
        self,
        dataset: CacheDataset,
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: KVBatchSampler | None = None,
        drop_last: bool = False,
        max_tokens: int | None = None,
        seed: int = 0,
        *,
        collate_fn: Callable[[list[Sample]], Any] = collate,
        threads: int = 2,
        prefetch: int = 2,
        prefetch_bytes: int | None = None,
        pinned: bool | None = None,
    ) -> None:
        if threads < 1 or prefetch < 1:
            raise InvalidRequest(f"a KVLoader needs a thread and a batch ahead, got {threads=} and {prefetch=}")
        self.dataset = dataset
        self.sampler = sampler or KVBatchSampler(dataset, batch_size, shuffle, drop_last, max_tokens, seed)
        self.collate_fn = collate_fn
        self.threads = threads
        self.prefetch = prefetch
        self.prefetch_bytes = prefetch_bytes
        self._allocate = Buffers(prefetch + 2, torch.cuda.is_available() if pinned is None else pinned)
        self.wait_seconds = 0.0

    batch_sampler = None  # Lightning's predict looks for one

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Any:
        return self.sampler.taken(self._batches())

    def stats(self) -> dict[str, float]:
        """The dataset's counts, and the seconds that the consumer waited for batches (``wait_seconds``)."""
        counts: dict[str, float] = getattr(self.dataset, "stats", dict)()
        return {**counts, "wait_seconds": self.wait_seconds}

    def _batches(self) -> Iterator[Any]:
        ahead = _Ahead(self._read, iter(self.sampler), self.dataset.batch_bytes, self.prefetch, self.prefetch_bytes)
        ahead.start(self.threads)
        try:
            while True:
                started = time.perf_counter()
                try:
                    batch = ahead.next()
                except StopIteration:
                    return
                finally:
                    self.wait_seconds += time.perf_counter() - started
                yield batch
                del batch  # its buffer may be the consumer's alone
        finally:
            ahead.stop()

    def _read(self, indices: Sequence[int]) -> Any:
        return self.collate_fn(self.dataset.fetch(indices, self._allocate))


@dataclass
class _Ahead:
    """Threads that read batches in order of their numbers, and one consumer that takes them in that order."""

    read: Callable[[Sequence[int]], Any]
    plan: Iterator[Sequence[int]]
    size: Callable[[Sequence[int]], int]  # asked for only where bytes are limited
    limit: int
    limit_bytes: int | None
    done: dict[int, tuple[Any, BaseException | None]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of what is being read or waits to be taken
    taken: int = 0
    planned: int = 0
    waiting: tuple[Sequence[int], int] | None = None  # the next batch's indices and bytes
    total: int | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, count: int) -> None:
        for number in range(count):
            thread = threading.Thread(target=self._run, name=f"kvdata-fetch-{number}", daemon=True)
            self.threads.append(thread)
            thread.start()

    def next(self) -> Any:
        """The next batch, or the error that reading it raised; `StopIteration` behind the last."""
        with self.changed:
            while self.taken not in self.done:
                if self.total is not None and self.taken >= self.total:
                    raise StopIteration
                if not any(thread.is_alive() for thread in self.threads):
                    raise RuntimeError("the loader's threads have ended without a batch")
                self.changed.wait(_CHECK_SECONDS)
            batch, error = self.done.pop(self.taken)
            del self.sizes[self.taken]
            self.taken += 1
            self.changed.notify_all()
        if error is not None:
            raise error
        return batch

    def stop(self) -> None:
        """End the threads; each ends after what it is reading, within the dataset's time-out, and retries nothing."""
        with self.changed:
            self.stopped.set()
            self.done.clear()
            self.changed.notify_all()
        for thread in self.threads:
            thread.join()

    def _run(self) -> None:
        end_retries_with(self.stopped)
        while (job := self._job()) is not None:
            number, indices = job
            try:
                result: tuple[Any, BaseException | None] = (self.read(indices), None)
            except BaseException as exc:
                result = (None, exc)
            with self.changed:
                if not self.stopped.is_set():
                    self.done[number] = result
                self.changed.notify_all()
            del result

    def _job(self) -> tuple[int, Sequence[int]] | None:
        """Number and indices of the next batch to read, once there is room for it."""
        with self.changed:
            while not self.stopped.is_set():
                if self.waiting is None and not self._plan_next():
                    break
                assert self.waiting is not None
                indices, size = self.waiting
                if len(self.sizes) < self.limit and self._fits(size):
                    self.waiting = None
                    return self._number(size), indices
                self.changed.wait(_CHECK_SECONDS)
            return None

    def _plan_next(self) -> bool:
        """Make the next batch the one that waits for room; False behind the last, or at an error, which is the last."""
        try:
            indices = next(self.plan, None)
            if indices is not None:
                self.waiting = indices, 0 if self.limit_bytes is None else self.size(indices)
                return True
        except BaseException as exc:
            self.plan = iter(())
            self.done[self._number(0)] = (None, exc)
        self.total = self.planned
        self.changed.notify_all()
        return False

    def _number(self, size: int) -> int:
        """The next batch's number, noted with its bytes."""
        number = self.planned
        self.planned += 1
        self.sizes[number] = size
        return number

    def _fits(self, size: int) -> bool:
        return self.limit_bytes is None or not self.sizes or sum(self.sizes.values()) + size <= self.limit_bytes
