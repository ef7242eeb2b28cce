"""Moving chunks: through the server's shared memory, or as pickles. Callers never ask which.

Each transfer reads a locked hit as one tensor per chunk and writes a tensor's missing chunks.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from kvdata.client.claims import Claim
from kvdata.client.copying import copy_all
from kvdata.client.deadline import Deadline
from kvdata.client.request import Request
from kvdata.client.session import Session
from kvdata.errors import ConnectionLost, KVCacheSDKError, ProtocolError, StoreFailed
from kvdata.layout import dtype_name
from kvdata.wire import tensors
from kvdata.wire.messages import PreparedRetrieve, PreparedStore, Slot

# Older releases publish what a dead writer left in its slots; a pickle commit reserves and writes in one call.
_SAFE_RESERVATIONS = (0, 5, 6)


class Vanished(KVCacheSDKError):
    """A locked hit was no longer there when it was to be read (lock expired or forced clear)."""


def chunk_tensors(session: Session, reply: PreparedRetrieve, chunks: int) -> list[torch.Tensor]:
    """One worker's chunks out of a successful reply, as flat tensors: views of the pool, or copies.

    Views are valid until their locks are released.
    """
    if session.pool is None:
        numel = session.shard.token_bytes // session.shard.dtype.itemsize * session.chunk_size
        return [chunk.flatten() for chunk in tensors.loads(reply.data, session.shard.dtype, numel, chunks)]
    slots = reply.context.slots
    if len(slots) != chunks:
        raise ProtocolError(
            f"prepare_retrieve: {session.connection.url} answered {len(slots)} slots for {chunks} chunks; see its log"
        )
    return _map_slots(session, slots)


def check_pool(session: Session, operation: str) -> None:
    """`ConnectionLost` when the pool that is mapped here is not the server's any more."""
    # A restarted server has a new segment of the same name; the old mapping would be read or written in vain.
    if session.pool is not None and not session.pool.is_current():
        session.mark_stale()
        raise ConnectionLost(
            f"{operation}: the shared memory of {session.connection.url} was replaced or removed; it must have "
            "restarted: call again"
        )


def reserves(session: Session) -> bool:
    """Whether a store reserves the chunks that are missing and writes only these; else it sends what it is given."""
    return session.pool is not None and session.info.release >= _SAFE_RESERVATIONS


def write(
    session: Session, request: Request, kv: torch.Tensor, start: int, worker: int, deadline: Deadline
) -> int | None:
    """Write one worker's part of ``kv`` (``[2, L, T, D]`` of its heads): the chunks from ``start`` on that are missing.

    Returns how many were written, or None where the server does not tell (pickle commits).
    """
    if reserves(session):
        return _write_slots(session, request, kv, start, worker, deadline)
    _write_pickle(session, request, kv, start, worker, deadline)
    return None


def _chunk(session: Session, kv: torch.Tensor, index: int) -> torch.Tensor:
    size = session.chunk_size
    return kv[:, :, index * size : (index + 1) * size]


def _write_slots(
    session: Session, request: Request, kv: torch.Tensor, start: int, worker: int, deadline: Deadline
) -> int:
    claim = session.claims.make(request, range(start, request.chunks), worker, deadline)
    if claim.reply is None or not claim.reply.context.slots:
        session.claims.settled(claim)
        return 0  # never commit after an empty answer: it could publish another writer's buffer
    try:
        _fill(session, claim, claim.reply, kv)
        key = request.key(start, worker=worker)
        done = session.call("commit_store", key, session.instance_id, b"", result=bool, deadline=deadline)
    except BaseException:
        session.claims.abort(claim)
        raise
    session.claims.settled(claim)
    if not done:
        raise StoreFailed(
            f"commit_store: the server at {session.connection.url} refused {len(claim.reserved)} chunks of "
            f"{request.model_name}; store again"
        )
    return len(claim.reserved)


def _fill(session: Session, claim: Claim, reply: PreparedStore, kv: torch.Tensor) -> None:
    """Copy a claim's chunks of ``kv`` into their slots."""
    _check_reserved(session, claim, reply)
    slots, chunks = _map_slots(session, reply.context.slots), claim.reserved
    _check_claim(session, claim)
    check_pool(session, "store")
    copy_all(
        pair
        for index, slot in zip(chunks, slots, strict=True)
        for pair in session.shard.encode(_chunk(session, kv, index), slot)
    )
    check_pool(session, "store")
    _check_claim(session, claim)


def _check_claim(session: Session, claim: Claim) -> None:
    """`StoreFailed` once the server may have given the slots to somebody else."""
    claim.expired = time.monotonic() - claim.since >= session.info.write_ttl_seconds
    if claim.expired:
        raise StoreFailed(
            f"store: {session.connection.url} keeps a reservation for {session.info.write_ttl_seconds:g} s, and this "
            "process was held up for longer; store again, or give the server a longer --l1-write-ttl-seconds"
        )


def _check_reserved(session: Session, claim: Claim, reply: PreparedStore) -> None:
    slots, numbers = len(reply.context.slots), reply.context.chunk_indices
    asked = range(len(claim.chunks))
    if slots != len(numbers) or len({*numbers}) != slots or not {*numbers} <= {*asked}:
        raise ProtocolError(
            f"prepare_store: {session.connection.url} answered {slots} slots and {len(numbers)} chunk numbers; each "
            f"must have one, and be among the {len(asked)} chunks that were asked for, once"
        )


def _write_pickle(
    session: Session, request: Request, kv: torch.Tensor, start: int, worker: int, deadline: Deadline
) -> None:
    shape = session.shard.chunk_shape(session.chunk_size)
    chunks = []
    for index in range(start, request.chunks):
        chunk = torch.empty(shape, dtype=session.shard.dtype)
        copy_all(session.shard.encode(_chunk(session, kv, index), chunk))
        chunks.append(chunk)
    payload = tensors.dumps(chunks)
    done = session.call(
        "commit_store", request.key(start, worker=worker), session.instance_id, payload, result=bool, deadline=deadline
    )
    if not done:
        raise StoreFailed(
            f"commit_store: the server at {session.connection.url} refused {len(chunks)} chunks of "
            f"{request.model_name}; see its log"
        )


def _map_slots(session: Session, slots: list[Slot]) -> list[torch.Tensor]:
    assert session.pool is not None
    want = session.shard.token_bytes * session.chunk_size
    spans = sorted((slot.offset, slot.offset + slot.length) for slot in slots)
    if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        raise ProtocolError(f"{session.connection.url} handed out overlapping slots; see its log")
    views = []
    for slot in slots:
        if slot.length != want or slot.dtype not in ("uint8", dtype_name(session.shard.dtype)):
            raise ProtocolError(
                f"a slot of {session.connection.url} holds {slot.length} bytes of {slot.dtype[:20]!r}, a chunk of "
                f"{session.shard} has {want}; check the layout"
            )
        try:
            views.append(session.pool.view(slot.offset, slot.length, session.shard.dtype))
        except ValueError as exc:
            raise ProtocolError(
                f"{session.connection.url} handed out a slot outside its pool: {exc}; see its log"
            ) from exc
    return views
