"""What a client asks of a server's HTTP side: to delete chunks, whether it is known, and how full the memory is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdata.client.deadline import Deadline
from kvdata.client.discovery import engine_models, registered_clients
from kvdata.client.leftovers import CLEANUP_SECONDS
from kvdata.client.request import Request
from kvdata.errors import ProtocolError, UnsupportedServer
from kvdata.wire.keys import chunk_hashes, kv_rank

if TYPE_CHECKING:
    from kvdata.client.session import Session

_DELETES = (0, 5, 2)


def delete(
    session: Session, request: Request, chunks: Sequence[int], force: bool = False, worker: int | None = None
) -> tuple[int, int]:
    """Delete chunks (of one worker or all) from the server's memory; returns ``(deleted, locked)`` objects."""
    if session.info.release < _DELETES:
        release = ".".join(map(str, session.info.release))
        raise UnsupportedServer(f"LMCache {release} cannot delete chunks by key; it came with 0.5.2")
    session.leftovers.settle()  # our own read locks must not be in the way
    hashes = chunk_hashes(request.ids, session.chunk_size)
    keys = [
        {
            "chunk_hash_hex": hashes[i].hex(),
            "model_name": request.model_name,
            "kv_rank": kv_rank(session.world_size, worker),
            "object_group_id": 0,
            "cache_salt": request.salt,
        }
        for worker in (range(session.world_size) if worker is None else (worker,))
        for i in chunks
    ]
    body = {"tier": "l1", "force": force, "keys": keys}
    answer = session.http.json("DELETE", "/cache/objects", json=body, deadline=Deadline(CLEANUP_SECONDS))
    try:
        return int(answer["deleted"]), int(answer["skipped"])
    except (KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(
            f"delete: {session.http.url}/cache/objects answered without a count: {exc!r}; is this an LMCache server?"
        ) from exc


def is_registered(session: Session, deadline: Deadline) -> bool:
    """Whether lookups of the model can hit at all: an engine or this session has it registered."""
    status = session.http.json("GET", "/status", deadline=deadline)
    wanted = session.connection.model_name
    mine = registered_clients(status).get(session.instance_id) == session.name
    return mine and (session.name == wanted or wanted in engine_models(status))


def is_served(session: Session, deadline: Deadline) -> bool:
    """Whether an engine has the model registered now."""
    return session.connection.model_name in engine_models(session.http.json("GET", "/status", deadline=deadline))


def memory(session: Session, deadline: Deadline) -> tuple[int, int]:
    """``(used, total)`` bytes of the server's pool."""
    status = session.http.json("GET", "/status", deadline=deadline)
    try:
        manager = status["storage_manager"]["l1_manager"]
        return int(manager["memory_used_bytes"]), int(manager["memory_total_bytes"])
    except (KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(f"the server's /status lacks {exc}") from exc
