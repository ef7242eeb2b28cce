"""Anonymous memory while iterating, in a process of its own: nothing that another row left behind counts."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.figures import Figure
from benchmarks.measure import row
from benchmarks.stack import Stack
from kvdata import Connection, KVCacheDataset, collate
from kvdata.datasets import KVLoader

_SAMPLE_SECONDS = 0.002
_EPOCHS = 2
_DEADLINE_SECONDS = 120.0

# Batches of a dataset, so many samples in each, and how many of them are read ahead.
Make = Callable[[KVCacheDataset, int], tuple[Any, int]]


def dataloader0(dataset: KVCacheDataset, batch_size: int) -> tuple[Any, int]:
    """A DataLoader in this process."""
    return DataLoader(dataset, batch_size, collate_fn=collate), 0


def loader(dataset: KVCacheDataset, batch_size: int) -> tuple[Any, int]:
    """A KVLoader."""
    made = KVLoader(dataset, batch_size=batch_size)
    return made, made.prefetch


def held(make: Make) -> Figure:
    """The most over two epochs above what there was before, in batches; the limit is what it may be."""

    def figure(stack: Stack, _repeats: int) -> dict[str, Any]:
        sizes = stack.sizes
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            job = process.submit(_iterate, make, stack.prefixes, stack.connection(), sizes.batch)
            peak, prefetch = job.result(_DEADLINE_SECONDS)
        batch = 1e9 * stack.gigabytes(sizes.batch * sizes.sample)
        return row(peak / batch, "batches (at most the limit)", limit=prefetch + 2)

    return figure


def _iterate(make: Make, prefixes: Sequence[Sequence[int]], connection: Connection, batch_size: int) -> tuple[int, int]:
    dataset = KVCacheDataset(prefixes, connection=connection)
    batches, prefetch = make(dataset, batch_size)
    dataset.open()
    with _peak() as peak:
        for _ in range(_EPOCHS):
            for _ in batches:
                pass
    dataset.close()
    return peak(), prefetch


@contextmanager
def _peak() -> Iterator[Callable[[], int]]:
    """Gives, after the block, the most anonymous memory in it above that at its begin, in bytes."""
    gc.collect()
    ended, before = threading.Event(), anonymous()
    seen = [before]

    def watch() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            seen.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: max(seen) - before
    finally:
        ended.set()
        watcher.join()


def anonymous() -> int:
    """Bytes of this process's resident anonymous memory; mapped pools do not count."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


MEMORY: dict[str, Figure] = {"memory_dataloader0": held(dataloader0), "memory_loader": held(loader)}
