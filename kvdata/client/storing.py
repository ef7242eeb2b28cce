"""Storing a prefix: which chunks are missing, write them, confirm that they can be read."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvdata.client.admin import memory
from kvdata.client.deadline import Deadline
from kvdata.client.reading import Leases, readable_chunks
from kvdata.client.session import Session
from kvdata.client.transfer import reserves, write
from kvdata.errors import KVCacheSDKError, PoolFull, ProtocolError, StoreConflict, StoreFailed

# A server's evictor wakes once a second; a store into a full pool waits for a few of its rounds.
_FULL_POOL_SECONDS = 4.0


@dataclass(frozen=True)
class StoreReport:
    """What the last `KVCacheContext.store` did, in chunks."""

    chunks: int
    stored: int
    deduplicated: int
    bytes: int


def store_chunks(session: Session, kv: torch.Tensor, ids: list[int], salt: str, deadline: Deadline) -> StoreReport:
    """Store the whole chunks of ``kv`` (``[2, L, T, D]``, checked) that the server lacks, and confirm them."""
    chunks = len(ids) // session.chunk_size
    patience = Deadline(min(_FULL_POOL_SECONDS, deadline.remaining() / 2))  # the rest is for finding out why it is full
    # A reservation leaves out what is there already, in memory. What a second tier holds, only a lookup tells.
    look_first = not (reserves(session) and session.info.memory_only)
    stored = 0
    while True:
        present, written = _write_missing(session, kv, ids, salt, look_first, deadline)
        readable = chunks if present == chunks else readable_chunks(session, ids, salt, deadline)
        stored += max((chunks - present if count is None else count for count in written), default=0)
        if readable == chunks:
            new = min(stored, chunks)
            return StoreReport(chunks, new, chunks - new, new * session.chunk_size * session.layout.token_bytes)
        if all(written) and look_first:
            raise StoreFailed(
                f"{stored} chunks were committed but only {readable} of {chunks} are readable; the server evicted them "
                "at once or the commit came too late. Give it more memory (--l1-size-gb)"
            )
        if not all(written):
            if not patience.remaining():
                raise _nothing_reserved(session, chunks - readable, deadline)
            time.sleep(min(0.25, patience.remaining()))
        look_first = True  # its locks keep what is there from being evicted while the rest is written


def _write_missing(
    session: Session, kv: torch.Tensor, ids: list[int], salt: str, look_first: bool, deadline: Deadline
) -> tuple[int, list[int | None]]:
    """Leading chunks that are known to be there, and how many of the others each worker's part has written."""
    with Leases(session, [(ids, salt)], wait=False) as leases:
        (lease,) = leases.look_up(deadline).each if look_first else leases.each
        present = lease.chunks = lease.chunks or 0  # nothing is locked where nobody has looked
        if present == lease.request.chunks:
            return present, []
        parts = enumerate(kv.chunk(session.world_size, dim=-1))
        return present, [write(session, lease.request, part, present, worker, deadline) for worker, part in parts]


def _nothing_reserved(session: Session, chunks: int, deadline: Deadline) -> KVCacheSDKError:
    """Why a server reserved nothing: its empty answer does not say, its memory figures do."""
    need = chunks * session.chunk_size * session.layout.token_bytes
    try:
        used, total = memory(session, deadline)
    except ProtocolError as exc:
        return StoreFailed(f"the server reserved nothing for {chunks} chunks, and does not say why: {exc}")
    if used + need > total:
        return PoolFull(
            f"{chunks} chunks need {need:,} bytes; the server uses {used:,} of {total:,} and evicted none in time. "
            "Give it more memory (--l1-size-gb), or lower its eviction watermark"
        )
    return StoreConflict(
        f"another writer holds reservations on some of these {chunks} chunks; retry when it has finished or its "
        "write TTL has passed"
    )
