"""Moving chunks: through the server's shared memory, or as pickles. Callers never ask which.

Each transfer reads a locked hit as one tensor per chunk and writes a tensor's missing chunks.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kvdata.client.copying import copy_all
from kvdata.client.request import Request
from kvdata.client.rpc import Deadline
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
        raise ProtocolError(f"prepare_retrieve answered {len(slots)} slots for {chunks} chunks")
    return _map_slots(session, slots)


def check_pool(session: Session, operation: str) -> None:
    """`ConnectionLost` when the pool that is mapped here is not the server's any more."""
    # A restarted server has a new segment of the same name; the old mapping would be read or written in vain.
    if session.pool is not None and not session.pool.is_current():
        session.mark_stale()
        raise ConnectionLost(f"{operation}: the server's shared memory was replaced; it must have restarted")


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
    key = request.key(start, worker=worker)
    missing = list(range(start, request.chunks))
    try:
        with session.waiting():
            reply = session.call("prepare_store", key, session.instance_id, result=PreparedStore, deadline=deadline)
    except BaseException:
        session.abort(request, missing, worker)  # the reply may be lost with slots reserved
        raise
    if reply is None or not reply.context.slots:
        return 0  # never commit after an empty answer: it could publish another writer's buffer
    reserved = [start + index for index in reply.context.chunk_indices]
    try:
        _check_reserved(reserved, len(reply.context.slots), missing)
        slots = _map_slots(session, reply.context.slots)
        copy_all(
            pair
            for index, slot in zip(reserved, slots, strict=True)
            for pair in session.shard.encode(_chunk(session, kv, index), slot)
        )
        check_pool(session, "store")
        done = session.call("commit_store", key, session.instance_id, b"", result=bool, deadline=deadline)
    except BaseException:
        session.abort(request, sorted({*reserved} & {*missing}), worker)
        raise
    if not done:
        raise StoreFailed(f"the server refused to commit {len(slots)} chunks of {request.model_name}; store again")
    return len(slots)


def _check_reserved(reserved: list[int], slots: int, missing: list[int]) -> None:
    if slots != len(reserved) or len({*reserved}) != slots or not {*reserved} <= {*missing}:
        raise ProtocolError(
            f"prepare_store answered {slots} slots and {len(reserved)} chunk numbers; each must have one, and be among "
            f"the {len(missing)} chunks that were asked for, once"
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
        raise StoreFailed(f"the server refused {len(chunks)} chunks of {request.model_name}; see its log")


def _map_slots(session: Session, slots: list[Slot]) -> list[torch.Tensor]:
    assert session.pool is not None
    want = session.shard.token_bytes * session.chunk_size
    spans = sorted((slot.offset, slot.offset + slot.length) for slot in slots)
    if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        raise ProtocolError("the server handed out overlapping slots")
    views = []
    for slot in slots:
        if slot.length != want or slot.dtype not in ("uint8", dtype_name(session.shard.dtype)):
            raise ProtocolError(
                f"the server's slot holds {slot.length} bytes of {slot.dtype[:20]!r}, "
                f"a chunk of {session.shard} has {want}"
            )
        try:
            views.append(session.pool.view(slot.offset, slot.length, session.shard.dtype))
        except ValueError as exc:
            raise ProtocolError(f"the server handed out a slot outside its pool: {exc}") from exc
    return views
