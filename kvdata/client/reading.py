"""From a lookup to one ``[2, L, T, D]`` tensor: the only place where cached KV is copied out of a server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from kvdata.client.rpc import Deadline
from kvdata.client.session import Session
from kvdata.client.transfer import reading
from kvdata.errors import GeometryMismatch
from kvdata.layout import KVLayout

Layers = Sequence[int] | slice | None


@dataclass
class Lease:
    """A hit: its length in tokens and each worker's chunks (flat tensors), read-locked until `close`."""

    hit: int
    workers: list[list[torch.Tensor]]
    layout: KVLayout
    _locks: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Release the server's locks; the chunks are invalid from here on."""
        self._locks.close()


def open_lease(session: Session, ids: Sequence[int], salt: str, deadline: Deadline) -> Lease:
    """Look ``ids`` up and lock what is there; an empty lease on a miss."""
    with ExitStack() as locks:
        request = locks.enter_context(session.sequence(ids, salt))
        hit = session.lookup(request, deadline) if request.chunks else 0
        workers: list[list[torch.Tensor]] = []
        try:
            while hit and len(workers) < session.world_size:
                worker = len(workers)
                workers.append(locks.enter_context(reading(session, request, hit, worker, deadline)))
        except BaseException:  # the worker that failed has given its locks back, the ones after it still hold theirs
            for worker in range(len(workers) + 1, session.world_size):
                session.release(request, hit, worker)
            raise
        return Lease(hit * session.chunk_size, workers, session.layout, locks.pop_all())


def readable_chunks(session: Session, ids: Sequence[int], salt: str, deadline: Deadline) -> int:
    """How many leading chunks of ``ids`` the server holds; no lock is kept."""
    with session.sequence(ids, salt) as request:
        hit = session.lookup(request, deadline) if request.chunks else 0
        session.release(request, hit)
        return hit


def gather(lease: Lease, layers: Layers, out: torch.Tensor | None) -> torch.Tensor:
    """Copy a lease's chunks into one ``[2, L', hit, D]`` tensor: each byte is moved once."""
    layout = lease.layout
    index = range(layout.num_layers)[layers] if isinstance(layers, slice) else layers
    numbers = None if index is None else _layer_numbers(index, layout)
    count = layout.num_layers if numbers is None else len(numbers)
    if out is None:
        out = torch.empty((2, count, lease.hit, layout.hidden), dtype=layout.dtype)
    elif (
        out.ndim != 4
        or out.shape[:2] != (2, count)
        or out.shape[2] < lease.hit
        or out.shape[3] != layout.hidden
        or out.device.type != "cpu"
    ):
        raise GeometryMismatch(
            f"out has shape {tuple(out.shape)} on {out.device}, this hit needs "
            f"[2, {count}, {lease.hit}, {layout.hidden}] on the CPU"
        )
    shard = layout.shard(len(lease.workers))
    for chunks, part in zip(lease.workers, out.chunk(len(lease.workers), dim=-1), strict=True):
        for chunk, target in zip(chunks, part[:, :, : lease.hit].chunk(len(chunks), dim=2), strict=True):
            if numbers is None:
                shard.decode(chunk, target)
            else:
                for row, layer in enumerate(numbers):
                    shard.decode(chunk, target[:, row : row + 1], layer)
    return out[:, :, : lease.hit]


def views(lease: Lease) -> list[torch.Tensor]:
    """Each chunk of a lease as ``[2, L, chunk, H, S]``: a view where one worker holds all heads, else a copy."""
    if len(lease.workers) < 2:
        return [lease.layout.view(chunk) for chunks in lease.workers for chunk in chunks]
    shard = lease.layout.shard(len(lease.workers))
    return [torch.cat([shard.view(c) for c in column], dim=3) for column in zip(*lease.workers, strict=True)]


def _layer_numbers(index: Sequence[int], layout: KVLayout) -> list[int]:
    try:
        return [range(layout.num_layers)[layer] for layer in index]
    except IndexError as exc:
        raise GeometryMismatch(f"layers {list(index)} do not exist in a model of {layout.num_layers} layers") from exc
