"""What is reported without a mark: the other packings, first touch of the pool, memory held while iterating."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.measure import Trial, compare, memcpy, row, timed, undone
from benchmarks.rows import existing
from benchmarks.stack import Stack
from kvdata import Connection, KVCacheDataset, collate

# Makes rows of `measure.row` from a stack and the number of repeats.
Figure = Callable[[Stack, int], dict[str, Any]]

BLOCK_SIZE = 128  # of vLLM's CPU backend
_SAMPLE_SECONDS = 0.002


def _packed(stack: Stack, packing: str) -> Connection:
    """To a model that no engine has registered, whose K and V are not apart."""
    layout = stack.sizes.layout.with_packing(packing, min(BLOCK_SIZE, stack.sizes.chunk))
    return Connection(stack.server.url, stack.server.http_url, f"bench/{packing}", layout=layout)


def packed_retrieve(packing: str) -> Figure:
    """`rows.retrieve` in another packing."""

    def figure(stack: Stack, repeats: int) -> dict[str, Any]:
        tokens, out = stack.tokens(stack.sizes.prefix), torch.zeros_like(stack.kv)
        with _packed(stack, packing).connect() as ctx:
            ctx.store(stack.kv, tokens)
            work = timed(lambda: ctx.retrieve(tokens, out=out))
            trial = Trial(stack.gigabytes(len(tokens)), "GB/s", work, limit=memcpy(stack.kv))
            found = compare(trial, repeats)
            assert torch.equal(out, stack.kv)
            ctx.delete(tokens)
        return found

    return figure


def packed_store(packing: str) -> Figure:
    """`rows.store` in another packing."""

    def figure(stack: Stack, repeats: int) -> dict[str, Any]:
        tokens = stack.tokens(stack.sizes.prefix)
        with _packed(stack, packing).connect() as ctx:
            work = undone(timed(lambda: ctx.store(stack.kv, tokens)), lambda: ctx.delete(tokens))
            trial = Trial(stack.gigabytes(len(tokens)), "GB/s", work, limit=memcpy(stack.kv, shared=True))
            return compare(trial, repeats)

    return figure


def first_touch(prefault: bool) -> Figure:
    """`rows.store` by a process that has just connected, with or without touching the pool at connect."""

    def figure(stack: Stack, repeats: int) -> dict[str, Any]:
        connection, tokens = stack.connection(prefault=prefault), stack.tokens(stack.sizes.prefix)

        def store() -> float:
            with connection.connect() as ctx:
                return undone(timed(lambda: ctx.store(stack.kv, tokens)), lambda: ctx.delete(tokens))()

        limit = memcpy(stack.kv, shared=True)
        return compare(Trial(stack.gigabytes(len(tokens)), "GB/s", store, limit=limit), repeats)

    return figure


def connecting(prefault: bool) -> Figure:
    """Connecting and un-registering, with or without touching the pool."""

    def figure(stack: Stack, repeats: int) -> dict[str, Any]:
        connection = stack.connection(prefault=prefault)
        return compare(Trial(1, "connects/s", timed(lambda: connection.connect().close())), repeats)

    return figure


def loader_memory(stack: Stack, _repeats: int) -> dict[str, Any]:
    """Anonymous memory while iterating a KVLoader."""
    dataset = KVCacheDataset(stack.prefixes, connection=stack.connection())
    loader = existing("KVLoader")(dataset, batch_size=stack.sizes.batch)
    return _held(stack, dataset, loader, prefetch=loader.prefetch)


def dataloader_memory(stack: Stack, _repeats: int) -> dict[str, Any]:
    """The same for a DataLoader in this process."""
    dataset = KVCacheDataset(stack.prefixes, connection=stack.connection())
    return _held(stack, dataset, DataLoader(dataset, stack.sizes.batch, collate_fn=collate), prefetch=0)


def _held(stack: Stack, dataset: KVCacheDataset, batches: Iterable[Any], prefetch: int) -> dict[str, Any]:
    """The most over two epochs above what there was before, in batches; the limit is what it may be."""
    dataset.open()
    with _peak() as peak:
        for _ in range(2):
            for _ in batches:
                pass
    dataset.close()
    batch = 1e9 * stack.gigabytes(stack.sizes.batch * stack.sizes.sample)
    return row(peak() / batch, "batches (at most the limit)", limit=prefetch + 2)


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


FIGURES: dict[str, Figure] = {
    "retrieve_fused": packed_retrieve("fused"),
    "retrieve_vllm_cpu": packed_retrieve("vllm-cpu"),
    "store_fused": packed_store("fused"),
    "store_vllm_cpu": packed_store("vllm-cpu"),
    "store_first_touch": first_touch(prefault=False),
    "store_prefaulted": first_touch(prefault=True),
    "connect": connecting(prefault=False),
    "connect_prefault": connecting(prefault=True),
    "memory_dataloader0": dataloader_memory,
    "memory_loader": loader_memory,
}
