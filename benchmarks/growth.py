"""How figures grow: bytes a token with the number of prefixes, control plane with chunks, bandwidth with ranks."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.figures import Figure
from benchmarks.measure import Trial, compare, row, timed
from benchmarks.stack import Stack
from kvdata import Connection, KVCacheDataset, Prefixes, PrefixRecord, collate

PREFIX_TOKENS = 256  # in `prefixes`: one chunk, the least a server stores


def chunks(count: int) -> Figure:
    """Retrieves of so many chunks, of a geometry so small that only the control plane counts."""

    def figure(stack: Stack, repeats: int) -> dict[str, Any]:
        ctx, tokens = stack.small, stack.tokens(count * stack.sizes.chunk)
        kv = torch.zeros(2, ctx.layout.num_layers, len(tokens), ctx.layout.hidden, dtype=ctx.layout.dtype)
        ctx.store(kv, tokens)
        work = timed(lambda: ctx.retrieve(tokens, out=kv))
        theirs = stack.theirs("retrieve", small=True, tokens=tokens)
        return compare(Trial(1, "retrieves/s", work, theirs), repeats)

    return figure


def prefixes(count: int) -> Figure:
    """Bytes that `Prefixes` hold per token, for so many prefixes of `PREFIX_TOKENS`."""

    def figure(_stack: Stack, _repeats: int) -> dict[str, Any]:
        ids = np.arange(PREFIX_TOKENS, dtype=np.int64)
        made = Prefixes(PrefixRecord(ids) for _ in range(count))
        return row(held(made) / (count * PREFIX_TOKENS), "bytes/token")

    return figure


def held(thing: Any) -> int:
    """Bytes of an object and everything that it alone refers to."""
    seen: set[int] = set()

    def size(part: Any) -> int:
        if id(part) in seen or isinstance(part, type):
            return 0
        seen.add(id(part))
        return sys.getsizeof(part) + sum(map(size, _parts(part)))

    return size(thing)


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, (list, tuple)):
        yield from thing
    elif isinstance(thing, np.ndarray):
        if thing.base is not None:
            yield thing.base
    elif hasattr(thing, "__dict__"):
        yield from vars(thing).values()


def ranks(count: int) -> Figure:
    """Epochs shared by so many gloo ranks, each with a DataLoader in its own process; all their bytes together."""

    def figure(stack: Stack, repeats: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            job = (count, folder, stack.prefixes, stack.connection(), stack.sizes.batch, repeats)
            start_processes(_rank, job, nprocs=count)
            seconds = float((Path(folder) / "seconds").read_text())
        return row(stack.gigabytes(stack.sizes.samples * stack.sizes.sample) / seconds, "GB/s")

    return figure


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    prefixes: Sequence[Sequence[int]],
    connection: Connection,
    batch: int,
    repeats: int,
) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    dataset = KVCacheDataset(prefixes, connection=connection)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch, sampler=sampler, collate_fn=collate)
    taken = []
    for _ in range(repeats + 1):
        distributed.barrier()
        started = time.perf_counter()
        for _ in loader:
            pass
        distributed.barrier()
        taken.append(time.perf_counter() - started)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(statistics.median(taken[1:])))
    dataset.close()
    distributed.destroy_process_group()


GROWTH: dict[str, Figure] = {
    **{f"chunks_{count}": chunks(count) for count in (1, 4, 16, 64, 256)},
    **{f"ranks_{count}": ranks(count) for count in (1, 2, 4)},
    **{f"prefixes_1e{power}": prefixes(10**power) for power in range(2, 7)},
}
