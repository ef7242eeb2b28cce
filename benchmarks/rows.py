"""The rows that have a mark: each makes a `Trial` of ours, LMCache's SDK and what the machine can do.

A new row is one function here, named as it is to appear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.measure import NotRun, Trial, Work, memcpy, timed
from benchmarks.stack import Stack
from kvdata import KVCacheDataset, collate, datasets, worker_init_fn

ROWS: dict[str, Callable[[Stack], AbstractContextManager[Trial]]] = {}


def row(make: Callable[[Stack], Iterator[Trial]]) -> Callable[[Stack], AbstractContextManager[Trial]]:
    """Register a generator function that yields a `Trial` and cleans up after it."""
    ROWS[make.__name__] = contextmanager(make)
    return ROWS[make.__name__]


@row
def retrieve(stack: Stack) -> Iterator[Trial]:
    """A prefix into a buffer that is used again."""
    ctx, tokens, out = stack.ctx, stack.prefix, torch.zeros_like(stack.kv)
    ctx.retrieve(tokens, out=out)
    assert torch.equal(out, stack.kv)
    yield Trial(
        stack.gigabytes(len(tokens)),
        "GB/s",
        timed(lambda: ctx.retrieve(tokens, out=out)),
        upstream(stack, "retrieve", tokens=tokens),
        memcpy(stack.kv),
    )


@row
def one_layer(stack: Stack) -> Iterator[Trial]:
    """One layer of a prefix; the SDK must fetch all."""
    ctx, tokens, layer = stack.ctx, stack.prefix, stack.sizes.layout.num_layers // 2
    wanted = stack.kv[:, layer : layer + 1].contiguous()
    out = torch.zeros_like(wanted)
    ctx.retrieve(tokens, layers=[layer], out=out)
    assert torch.equal(out, wanted)
    yield Trial(
        stack.gigabytes(len(tokens), layers=1),
        "GB/s",
        timed(lambda: ctx.retrieve(tokens, layers=[layer], out=out)),
        upstream(stack, "retrieve", tokens=tokens, layer=layer),
        memcpy(wanted),
    )


@row
def store(stack: Stack) -> Iterator[Trial]:
    """A prefix into slots that were written before; it is deleted again, untimed."""
    ctx, kv, layout = stack.ctx, stack.kv, stack.sizes.layout
    tokens = stack.tokens(kv.shape[2])
    slots = kv.clone().share_memory_()  # what the pool is: shared memory, touched

    def deleting(work: Work) -> Work:
        def stored() -> float:
            seconds = work()
            assert ctx.delete(tokens)
            return seconds

        return stored

    theirs = upstream(stack, "store", tokens=tokens, layers=layout.num_layers, hidden=layout.hidden)
    yield Trial(
        stack.gigabytes(len(tokens)),
        "GB/s",
        deleting(timed(lambda: ctx.store(kv, tokens))),
        theirs and deleting(theirs),
        timed(lambda: slots.copy_(kv)),
    )


@row
def lookup(stack: Stack) -> Iterator[Trial]:
    """Prefixes that are all there; ours gives every lock back within its time. The limit is a bare round trip each."""
    ctx, sizes = stack.small, stack.sizes
    prefixes = [stack.tokens(sizes.sample) for _ in range(sizes.lookups)]
    kv = torch.zeros(2, ctx.layout.num_layers, sizes.sample, ctx.layout.hidden, dtype=ctx.layout.dtype)
    for tokens in prefixes:
        ctx.store(kv, tokens)

    def look() -> None:
        found = [ctx.lookup(tokens) for tokens in prefixes]
        assert found == [sizes.sample] * len(prefixes)

    yield Trial(
        len(prefixes),
        "lookups/s (limit: round trips/s)",
        timed(look),
        upstream(stack, "lookup", small=True, prefixes=prefixes),
        timed(lambda: [ctx.ping() for _ in prefixes]) if hasattr(ctx, "ping") else None,
    )


@row
def dataloader0(stack: Stack) -> Iterator[Trial]:
    """An epoch through a DataLoader in this process."""
    yield from _dataloader(stack, workers=0)


@row
def dataloader2(stack: Stack) -> Iterator[Trial]:
    """An epoch through a DataLoader with two workers."""
    yield from _dataloader(stack, workers=2)


@row
def loader(stack: Stack) -> Iterator[Trial]:
    """An epoch through KVLoader."""
    if not hasattr(datasets, "KVLoader"):
        raise NotRun("kvdata has no KVLoader")
    dataset = KVCacheDataset(stack.prefixes, connection=stack.connection())
    try:
        yield _epochs(stack, datasets.KVLoader(dataset, batch_size=stack.sizes.batch), workers=0)
    finally:
        dataset.close()


def _dataloader(stack: Stack, workers: int) -> Iterator[Trial]:
    dataset = KVCacheDataset(stack.prefixes, connection=stack.connection())
    more: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "spawn"} if workers else {}
    made = DataLoader(
        dataset, stack.sizes.batch, num_workers=workers, collate_fn=collate, worker_init_fn=worker_init_fn, **more
    )
    try:
        yield _epochs(stack, made, workers)
    finally:
        del made  # and with it the workers
        dataset.close()
        if stack.upstream:
            stack.upstream.release()


def _epochs(stack: Stack, batches: Any, workers: int) -> Trial:
    sizes = stack.sizes

    def epoch() -> None:
        samples = sum(len(batch) for batch in batches)
        assert samples == sizes.samples

    one_batch = stack.kv.new_zeros(sizes.batch, 2, sizes.layout.num_layers, sizes.sample, sizes.layout.hidden)
    job = {"prefixes": stack.prefixes, "batch_size": sizes.batch, "workers": workers}
    return Trial(
        stack.gigabytes(sizes.samples * sizes.sample),
        "GB/s",
        timed(epoch),
        upstream(stack, "epoch", **job),
        memcpy(one_batch.normal_(), sizes.samples // sizes.batch),
    )


def upstream(stack: Stack, operation: str, small: bool = False, **job: Any) -> Work | None:
    """The same by LMCache's SDK, where it can be run."""
    theirs, model = stack.upstream, stack.connection(small).model_name
    return None if theirs is None else lambda: theirs(operation, model, **job)
