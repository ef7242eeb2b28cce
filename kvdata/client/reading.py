"""Reading prefixes: look up, lock, map, copy, release - one prefix, or a batch whose requests are in flight together.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``H`` KV heads, ``S`` head size, ``D = H * S``; primes mark a part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch

from kvdata.client.copying import Pair, copy_all
from kvdata.client.deadline import Deadline
from kvdata.client.request import Request
from kvdata.client.rpc import Call
from kvdata.client.selection import WHOLE, Selection, runs
from kvdata.client.session import Session
from kvdata.client.transfer import Vanished, check_pool, chunk_tensors
from kvdata.errors import GeometryMismatch
from kvdata.layout import KVLayout, Part
from kvdata.wire.messages import PreparedRetrieve, Slot

# Token ids and salt of each prefix.
Wanted = Sequence[tuple[Sequence[int], str]]


@dataclass
class Lease:
    """One prefix on a server, and what of it is locked there.

    Attributes:
        request: the sequence.
        chunks: its leading chunks that are there; None until the server has told.
        span: the chunks that were asked for, of each worker.
        asked: workers that were asked for them. The reply may be lost.
        unsure: those of them of which it is not known whether the question has arrived.
        gone: workers that did not have them any more, and have released their locks by that.
        workers: each worker's chunks of the span, as flat tensors.
        slots: where they lie; empty in pickle mode.
    """

    request: Request
    chunks: int | None = None
    span: range = range(0)
    asked: set[int] = field(default_factory=set)
    unsure: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    workers: list[list[torch.Tensor]] = field(repr=False, default_factory=list)
    slots: list[list[Slot]] = field(repr=False, default_factory=list)

    @property
    def hit(self) -> int:
        """Leading tokens that are there."""
        return (self.chunks or 0) * self.request.chunk_size

    def give_back(self, world_size: int, instance_id: int) -> list[Call]:
        """Operations that release every lock it may hold, and end its session on the server."""
        if not self.request.chunks:
            return []  # nothing was sent
        calls: list[Call] = []
        if self.chunks is None or not self.asked:
            calls += self._free(range(self.request.chunks if self.chunks is None else self.chunks), None)
        else:
            for worker in range(world_size):
                calls += self._release(worker, self.chunks, instance_id)
        return [*calls, self.request.end()]

    def _release(self, worker: int, chunks: int, instance_id: int) -> list[Call]:
        if worker not in self.asked:
            return self._free(range(chunks), worker)
        calls = self._free(range(self.span.start), worker) + self._free(range(self.span.stop, chunks), worker)
        if worker in self.unsure:  # asking again locks no more; a server releases what it has recorded, and no more
            calls.append(self._about("prepare_retrieve", worker, instance_id))
        if worker not in self.gone:
            calls.append(self._about("commit_retrieve", worker, instance_id))
        return calls

    def _free(self, chunks: range, worker: int | None) -> list[Call]:
        if not chunks:
            return []
        return [self.request.free(chunks.start, chunks.stop, worker)]

    def _about(self, operation: str, worker: int, instance_id: int) -> Call:
        return Call(operation, self.asks(worker, instance_id), self.request.until)

    def asks(self, worker: int, instance_id: int) -> tuple[object, int]:
        """What goes with an operation on one worker's chunks of the span."""
        return self.request.key(self.span.start, self.span.stop, worker), instance_id


class Leases:
    """Prefixes that are read together. A context manager: at its end every lock is given back, in one go.

    Args:
        session: with the server.
        wanted: the prefixes.
        wait: at the end, for the server to have done so; else it does while this process goes on.
    """

    def __init__(self, session: Session, wanted: Wanted, wait: bool = True) -> None:
        self.session = session
        self._wait = wait
        self._open = True
        session.hold()
        self.each = [Lease(session.request(ids, salt)) for ids, salt in wanted]

    def __enter__(self) -> Leases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give all locks back; what is mapped is invalid from here on. Never raises."""
        if not self._open:
            return
        self._open = False
        leases, self.each = self.each, []
        session = self.session
        calls: list[Call] = []
        for lease in leases:
            if lease.chunks is None and not (session.info.memory_only and session.frees_its_own):
                session.leftovers.give_up(lease.request)  # what is not loaded yet, or not known, cannot be released yet
            else:
                calls += lease.give_back(session.world_size, session.instance_id)
        try:
            session.leftovers.give_back(calls, self._wait)
        finally:
            session.release()

    def look_up(self, deadline: Deadline) -> Leases:
        """Ask what is there, and lock it."""
        asked = [lease for lease in self.each if lease.request.chunks]
        for lease in self.each:
            lease.chunks = None if lease.request.chunks else 0
        found = self.session.lookup([lease.request for lease in asked], deadline) if asked else []
        for lease, chunks in zip(asked, found, strict=True):
            lease.chunks = chunks
        return self

    def prepare(self, deadline: Deadline, selection: Selection = WHOLE) -> Leases:
        """Map the chunks that the selection needs; `Vanished` when the server lost some meanwhile."""
        session = self.session
        asked = []
        for lease in self.each:
            lease.span = _chunks(selection.tokens(lease.hit), session.chunk_size)
            for worker in range(session.world_size) if lease.span else ():
                lease.asked.add(worker)
                asked.append((lease, worker))
                if session.pool is not None:  # a pickle releases its locks by itself
                    lease.unsure.add(worker)
        replies = self._prepared(asked, deadline)
        for (lease, worker), reply in zip(asked, replies, strict=True):
            lease.unsure.discard(worker)
            if reply.success:
                lease.workers.append(chunk_tensors(session, reply, len(lease.span)))
                lease.slots.append(reply.context.slots)
            else:
                lease.gone.add(worker)
        self._check_gone()
        return self

    def check(self) -> None:
        """`ConnectionLost` when what is mapped is not the server's memory any more: before each copy."""
        check_pool(self.session, "retrieve")

    def confirm(self, deadline: Deadline) -> None:
        """`Vanished` unless what has been copied was there, and locked, until now.

        A lock ends with the server's read TTL, if this process was held up for so long, and with a forced clear: what
        was copied then may be another's. The server knows; it answers the same only where nothing of that happened.
        """
        session = self.session
        self.check()
        if session.pool is None:
            return
        if any(lease.asked and time.monotonic() >= lease.request.until for lease in self.each):
            raise Vanished("chunks were read for longer than the server keeps a reader's locks")
        asked = [(lease, worker) for lease in self.each for worker in sorted(lease.asked)]
        for (lease, worker), reply in zip(asked, self._prepared(asked, deadline), strict=True):
            if not reply.success or reply.context.slots != lease.slots[worker]:
                lease.gone.add(worker)
        self._check_gone()

    def _prepared(self, asked: Sequence[tuple[Lease, int]], deadline: Deadline) -> list[PreparedRetrieve]:
        session = self.session
        calls = [Call("prepare_retrieve", lease.asks(w, session.instance_id)) for lease, w in asked]
        replies = session.call_many(calls, PreparedRetrieve, deadline)
        return [session.told("prepare_retrieve", reply) for reply in replies]

    def _check_gone(self) -> None:
        if any(lease.gone for lease in self.each):
            raise Vanished("chunks were taken from the server while they were read")


def readable_chunks(session: Session, ids: Sequence[int], salt: str, deadline: Deadline) -> int:
    """How many leading chunks of ``ids`` the server holds; no lock is kept."""
    with Leases(session, [(ids, salt)], wait=False) as leases:
        return leases.look_up(deadline).each[0].chunks or 0


def gather(lease: Lease, layout: KVLayout, selection: Selection, out: torch.Tensor | None) -> torch.Tensor:
    """Copy the selected part of a lease's chunks into one ``[2', L', T', D']`` tensor: each byte is moved once."""
    shape = selection.shape(layout, lease.hit)
    out = torch.empty(shape, dtype=layout.dtype) if out is None else _fitting(out, shape)
    if not lease.span:
        return out
    tokens, size = selection.tokens(lease.hit), lease.request.chunk_size
    shard = layout.shard(len(lease.workers))
    heads = list(runs(selection.head_numbers(layout), shard.num_kv_heads))
    layers = list(runs(selection.layer_numbers(layout), layout.num_layers))
    pairs: list[Pair] = []
    for number in lease.span:
        first = number * size
        inside = slice(max(tokens.start - first, 0), min(tokens.stop - first, size))
        target = out[:, :, first + inside.start - tokens.start : first + inside.stop - tokens.start]
        for worker, head_slice, columns in heads:
            chunk = lease.workers[worker][number - lease.span.start]
            part = target[..., columns.start * layout.head_dim : columns.stop * layout.head_dim]
            for _, layer_slice, rows in layers:
                wanted = Part(selection.kind_slice(), layer_slice, inside, head_slice)
                pairs += shard.decode(chunk, part[:, rows], wanted)
    copy_all(pairs)
    return out


def views(lease: Lease, layout: KVLayout) -> list[torch.Tensor]:
    """Each chunk of a lease as ``[2, L, chunk, H, S]``: a view where one worker holds all heads, else a copy."""
    if len(lease.workers) < 2:
        return [layout.view(chunk) for chunks in lease.workers for chunk in chunks]
    shard = layout.shard(len(lease.workers))
    return [torch.cat([shard.view(c) for c in column], dim=3) for column in zip(*lease.workers, strict=True)]


def _chunks(tokens: range, chunk_size: int) -> range:
    """Numbers of the chunks that hold these tokens."""
    return range(tokens.start // chunk_size, -(-tokens.stop // chunk_size)) if tokens else range(0)


def _fitting(out: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``out``, cut to the tokens of ``shape``; `GeometryMismatch` when it cannot hold them."""
    fits = out.ndim == 4 and out.shape[:2] == shape[:2] and out.shape[2] >= shape[2] and out.shape[3] == shape[3]
    if not fits or out.device.type != "cpu":
        raise GeometryMismatch(
            f"out has shape {tuple(out.shape)} on {out.device}, this hit needs {list(shape)} on the CPU"
        )
    return out[:, :, : shape[2]]
