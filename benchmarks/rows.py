"""The rows that have a mark: each makes a `Trial` of ours, LMCache's SDK and what the machine can do.

A new row is one function here, under the name with which it appears.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from torch.utils.data import DataLoader

from benchmarks.measure import Trial, Work, memcpy, timed, undone
from benchmarks.stack import Stack
from kvdata import KVCacheDataset, collate, worker_init_fn
from kvdata.datasets import KVLoader, KVSnapshotDataset, Snapshot
from kvdata.wire.messages import NEWEST, operation_numbers


@dataclass(frozen=True)
class Row:
    """How to make a trial, and what its ratios should be at least (None: reported only)."""

    make: Callable[[Stack], AbstractContextManager[Trial]]
    vs_upstream: float | None
    vs_limit: float | None


ROWS: dict[str, Row] = {}

Make = Callable[[Stack], Iterator[Trial]]


def row(vs_upstream: float | None = None, vs_limit: float | None = None) -> Callable[[Make], Make]:
    """Register a generator function that yields a `Trial` and cleans up after it."""

    def register(make: Make) -> Make:
        ROWS[make.__name__] = Row(contextmanager(make), vs_upstream, vs_limit)
        return make

    return register


@row(vs_upstream=3, vs_limit=0.75)
def retrieve(stack: Stack) -> Iterator[Trial]:
    """A prefix into a buffer that is used again."""
    ctx, tokens, out = stack.ctx, stack.prefix, torch.zeros_like(stack.kv)
    ctx.retrieve(tokens, out=out)
    assert torch.equal(out, stack.kv)
    yield Trial(
        stack.gigabytes(len(tokens)),
        "GB/s",
        timed(lambda: ctx.retrieve(tokens, out=out)),
        stack.theirs("retrieve", tokens=tokens),
        memcpy(stack.kv),
    )


@row(vs_upstream=1, vs_limit=0.5)
def store(stack: Stack) -> Iterator[Trial]:
    """A prefix into slots that were written before. It is deleted again, untimed."""
    ctx, kv, layout = stack.ctx, stack.kv, stack.sizes.layout
    tokens = stack.tokens(kv.shape[2])
    theirs = stack.theirs("store", tokens=tokens, layers=layout.num_layers, hidden=layout.hidden)
    yield Trial(
        stack.gigabytes(len(tokens)),
        "GB/s",
        undone(timed(lambda: ctx.store(kv, tokens)), lambda: ctx.delete(tokens)),
        theirs and undone(theirs, lambda: ctx.delete(tokens)),
        memcpy(kv, shared=True),
    )


@row(vs_upstream=3)
def lookup(stack: Stack) -> Iterator[Trial]:
    """Prefixes that are all there, in one call, locks given back; LMCache's SDK gives them back after its time.

    The limit is empty round trips: four messages a prefix (lookup, its result, locks, session), all in flight.
    """
    yield from _lookups(stack, release_timed=False)


@row()
def lookup_released(stack: Stack) -> Iterator[Trial]:
    """The same, with what LMCache's client needs to give the locks back in its time, too."""
    yield from _lookups(stack, release_timed=True)


def _lookups(stack: Stack, release_timed: bool) -> Iterator[Trial]:
    ctx, sizes = stack.small, stack.sizes
    prefixes = [stack.tokens(sizes.sample) for _ in range(sizes.lookups)]
    kv = torch.zeros(2, ctx.layout.num_layers, sizes.sample, ctx.layout.hidden, dtype=ctx.layout.dtype)
    for tokens in prefixes:
        ctx.store(kv, tokens)

    def look() -> None:
        assert ctx.lookup_many(prefixes) == [sizes.sample] * len(prefixes)

    theirs = stack.theirs("lookup", small=True, prefixes=prefixes, release_timed=release_timed)
    with _round_trips(stack.server.url, 4 * len(prefixes)) as limit:
        yield Trial(len(prefixes), "lookups/s", timed(look), theirs, limit)


@row(vs_upstream=20)
def one_layer(stack: Stack) -> Iterator[Trial]:
    """One layer of a prefix, another one each time so that no cache holds it. The SDK must fetch all."""
    ctx, tokens, out = stack.ctx, stack.prefix, torch.zeros_like(stack.kv[:, :1])
    layers = itertools.cycle(range(stack.sizes.layout.num_layers))
    ctx.retrieve(tokens, layers=[1], out=out)
    assert torch.equal(out, stack.kv[:, 1:2])
    yield Trial(
        stack.gigabytes(len(tokens), layers=1),
        "GB/s",
        timed(lambda: ctx.retrieve(tokens, layers=[next(layers)], out=out)),
        stack.theirs("retrieve", tokens=tokens, layer=1),
        timed(lambda: out.copy_(stack.kv[:, (layer := next(layers)) : layer + 1])),
    )


@row(vs_upstream=6, vs_limit=0.6)
def loader(stack: Stack) -> Iterator[Trial]:
    """An epoch through KVLoader."""
    dataset = KVCacheDataset(stack.prefixes, connection=stack.connection())
    try:
        yield _epochs(stack, KVLoader(dataset, batch_size=stack.sizes.batch))
    finally:
        dataset.close()


@row(vs_upstream=6, vs_limit=0.6)
def dataloader0(stack: Stack) -> Iterator[Trial]:
    """An epoch through a DataLoader in this process."""
    dataset = KVCacheDataset(stack.prefixes, connection=stack.connection())
    try:
        yield _epochs(stack, DataLoader(dataset, stack.sizes.batch, collate_fn=collate))
    finally:
        dataset.close()


@row(vs_upstream=4)
def dataloader2(stack: Stack) -> Iterator[Trial]:
    """An epoch through a DataLoader with two workers, which stay from one epoch to the next."""
    dataset = KVCacheDataset(stack.prefixes, connection=stack.connection())
    batches = DataLoader(
        dataset,
        stack.sizes.batch,
        num_workers=2,
        collate_fn=collate,
        worker_init_fn=worker_init_fn,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    try:
        yield _epochs(stack, batches, workers=2)
    finally:
        stack.release()


@row()
def snapshot(stack: Stack) -> Iterator[Trial]:
    """An epoch from a snapshot on disk, through a DataLoader in this process."""
    dataset = KVCacheDataset(stack.prefixes, connection=stack.connection())
    try:
        with tempfile.TemporaryDirectory() as folder:
            Snapshot.write(dataset, folder)
            yield _epochs(stack, DataLoader(KVSnapshotDataset(folder), stack.sizes.batch, collate_fn=collate))
    finally:
        dataset.close()


def _epochs(stack: Stack, batches: Any, workers: int = 0) -> Trial:
    """Whole epochs; the first one, which compare() does not count, connects and starts workers."""
    sizes, layout = stack.sizes, stack.sizes.layout

    def epoch() -> None:
        assert sum(len(batch) for batch in batches) == sizes.samples

    batch = torch.zeros(sizes.batch, 2, layout.num_layers, sizes.sample, layout.hidden, dtype=layout.dtype).normal_()
    return Trial(
        stack.gigabytes(sizes.samples * sizes.sample),
        "GB/s",
        timed(epoch),
        stack.theirs("epoch", prefixes=stack.prefixes, batch_size=sizes.batch, workers=workers),
        memcpy(batch, times=sizes.samples // sizes.batch),
    )


@contextmanager
def _round_trips(url: str, count: int) -> Iterator[Work]:
    """``count`` empty operations at once on one connection."""
    noop = bytes([operation_numbers(NEWEST)["noop"]])  # msgpack of a small number
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(url)

        def exchange() -> None:
            for _ in range(count):
                socket.send_multipart([b"\x00", noop])
            for _ in range(count):
                socket.recv_multipart()

        yield timed(exchange)
        socket.setsockopt(zmq.LINGER, 0)
