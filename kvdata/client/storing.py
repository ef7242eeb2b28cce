"""Storing a prefix: which chunks are missing, write them, confirm that they can be read."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvdata.client.reading import Leases, readable_chunks
from kvdata.client.rpc import Deadline
from kvdata.client.session import Session
from kvdata.client.transfer import write
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
    patience = Deadline(min(_FULL_POOL_SECONDS, deadline.remaining()))
    while True:
        written: list[int | None] = []
        with Leases(session, [(ids, salt)], wait=False) as leases:
            (lease,) = leases.look_up(deadline).each
            present = lease.chunks or 0
            if present < chunks:
                # The lookup's locks keep the chunks before `present` from being evicted meanwhile.
                written = [
                    write(session, lease.request, part, present, worker, deadline)
                    for worker, part in enumerate(kv.chunk(session.world_size, dim=-1))
                ]
        if present == chunks:
            return StoreReport(chunks, 0, chunks, 0)
        readable = readable_chunks(session, ids, salt, deadline)
        if readable == chunks:
            stored = max(chunks - present if count is None else count for count in written)
            return StoreReport(
                chunks, stored, chunks - stored, stored * session.chunk_size * session.layout.token_bytes
            )
        if all(written):
            count = max(n for n in written if n is not None)
            raise StoreFailed(
                f"{count} chunks were committed but only {readable} of {chunks} are readable; the server evicted them "
                "at once or the commit came too late. Give it more memory (--l1-size-gb)"
            )
        if not patience.remaining():
            raise _nothing_reserved(session, chunks - present)
        time.sleep(min(0.25, patience.remaining()))


def _nothing_reserved(session: Session, chunks: int) -> KVCacheSDKError:
    """Why a server reserved nothing: its empty answer does not say, its memory figures do."""
    need = chunks * session.chunk_size * session.layout.token_bytes
    try:
        used, total = session.memory()
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
