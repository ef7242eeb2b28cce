"""`Session`: one registration of one process with one incarnation of a server, and its raw operations.

A session is thrown away as a whole when the server restarts, when its pool is replaced, or after a fork.
The wire document's traps are dealt with here: see the comments.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvdata.client.connection import Connection
from kvdata.client.discovery import (
    Http,
    ServerInfo,
    discover,
    engine_models,
    published_layout,
    registered_clients,
    registered_world_size,
)
from kvdata.client.request import Request
from kvdata.client.rpc import Call, Deadline, Rpc
from kvdata.errors import (
    KVCacheSDKError,
    ModelNotRegistered,
    PoolNotMappable,
    ProtocolError,
    ServerTimeout,
    UnsupportedLayout,
    UnsupportedServer,
)
from kvdata.layout import KVLayout, dtype_name
from kvdata.wire.keys import chunk_hashes, kv_rank
from kvdata.wire.messages import Registered, Registration
from kvdata.wire.shm import MappedPool

T = TypeVar("T")
log = logging.getLogger("kvdata")

# Releasing what a failed call still holds may take this long beyond the call's own deadline.
CLEANUP_SECONDS = 2.0
_HANDSHAKE_SECONDS = 10.0
_DELETES = (0, 5, 2)
_FREES_PARTIAL_CHUNKS = (0, 5, 6)


class Session:
    """Registers with the server on creation; `close` un-registers.

    Args:
        connection: where and what.
        known_layout: geometry learnt in an earlier session, used when nothing on the server says it any more.
    """

    def __init__(self, connection: Connection, known_layout: KVLayout | None = None) -> None:
        self.connection = connection
        self.pid = os.getpid()
        self.pool: MappedPool | None = None
        self._registered = False
        self._stale = False
        self._owed: list[Call] = []
        self._reserving = False  # a reservation of ours may still be pending on the server
        deadline = Deadline(connection.timeout)
        self.http = Http(connection.http_url, min(connection.timeout, _HANDSHAKE_SECONDS))
        self._rpc: Rpc | None = None
        try:
            self.info = discover(self.http)
            self.layout, served = _resolve(self.info, connection, known_layout)
            if served:
                self.world_size = registered_world_size(self.info.engines[connection.model_name])
            else:
                self.world_size = connection.world_size or 1
            self.shard = self.layout.shard(self.world_size)
            # Beside an engine a registration under the real name would overwrite the engine's layout on the
            # server; without one, the real name must be registered or every lookup answers 0.
            self.name = f"kvdata/{uuid.uuid4().hex}" if served else connection.model_name
            self.instance_id = secrets.randbits(62)
            self._rpc = Rpc(connection.url, self.info.release)
            if self.chunk_size % (self.layout.block_size or 1):
                raise UnsupportedLayout(
                    f"{connection.http_url} has chunks of {self.chunk_size} tokens, which are not whole blocks of "
                    f"{self.layout.block_size}; start it with another --chunk-size"
                )
            self._check_peer(deadline)
            self._register(deadline)
        except BaseException:
            self.close()
            raise

    @property
    def chunk_size(self) -> int:
        """Tokens in a chunk."""
        return self.info.chunk_size

    def request(self, ids: Sequence[int], salt: str) -> Request:
        """A new request for the connection's model."""
        return Request.create(self.connection.model_name, self.world_size, salt, self.chunk_size, ids)

    def call(self, operation: str, *args: Any, result: type[T], deadline: Deadline) -> T | None:
        """One operation on the wire."""
        assert self._rpc is not None
        return self._rpc.call(operation, *args, result=result, deadline=deadline)

    def usable(self) -> bool:
        """False when the process forked, the server went away, or another pool took the name."""
        if self._stale or self.pid != os.getpid() or self._rpc is None or self._rpc.lost():
            return False
        return self.pool is None or self.pool.is_current()

    def mark_stale(self) -> None:
        """Make the next operation shake hands anew."""
        self._stale = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around calls: after a time-out or interrupt nothing waits for this connection again."""
        try:
            yield
        except BaseException as exc:
            if isinstance(exc, ServerTimeout) or not isinstance(exc, Exception):
                self.mark_stale()
            raise

    def call_many(self, calls: Sequence[Call], result: type[T], deadline: Deadline) -> list[T | None]:
        """Several operations, in flight together."""
        assert self._rpc is not None
        return self._rpc.call_many(calls, result, deadline)

    def lookup(self, requests: Sequence[Request], deadline: Deadline) -> list[int]:
        """Leading chunks that the server holds of each; they stay read-locked until retrieved or released.

        After an error it is unknown which were locked.
        """
        self.call_many([("lookup", (r.key(worker=None), 1)) for r in requests], type(None), deadline)
        hits: dict[str, int] = {}
        # Short polls: the server's own blocking wait would hold the only worker its engines share.
        for attempt in itertools.count():
            waiting = [r for r in requests if r.request_id not in hits]
            answers = self.call_many([("query_prefetch_status", (r.request_id,)) for r in waiting], int, deadline)
            for request, hit in zip(waiting, answers, strict=True):
                if hit is not None:
                    if not 0 <= hit <= request.chunks:
                        raise ProtocolError(f"lookup of {request.chunks} chunks answered {hit}")
                    hits[request.request_id] = hit
            if len(hits) == len(requests):
                break
            if not deadline.remaining():
                raise ServerTimeout(f"lookup: still loading after {deadline.seconds:g} s")
            time.sleep(min(0.02, 0.0005 * 2**attempt, deadline.remaining()))
        found = [hits[r.request_id] for r in requests]
        if self.world_size > 1 and self.info.release < _FREES_PARTIAL_CHUNKS:
            # There the shares that are there of the first missing chunk are locked, too.
            short = [(r, hit) for r, hit in zip(requests, found, strict=True) if hit < r.chunks]
            self.clean_up([("free_lookup_locks", (r.key(hit, hit + 1), 1)) for r, hit in short])
        return found

    def abort(self, request: Request, chunks: Sequence[int], worker: int) -> None:
        """Discard reservations of a failed store before anything could publish them. Never raises."""
        try:
            self.delete(request, chunks, force=True, worker=worker)
        except KVCacheSDKError as exc:
            self._reserving = True
            self.mark_stale()
            log.warning("a failed store could not be aborted (%s); the server drops it after its write TTL", exc)

    def delete(
        self, request: Request, chunks: Sequence[int], force: bool = False, worker: int | None = None
    ) -> tuple[int, int]:
        """Delete chunks (of one worker or all) from the server's memory; returns ``(deleted, locked)`` objects."""
        if self.info.release < _DELETES:
            release = ".".join(map(str, self.info.release))
            raise UnsupportedServer(f"LMCache {release} cannot delete chunks by key; it came with 0.5.2")
        self.settle_posted()  # our own read locks must not be in the way
        hashes = chunk_hashes(request.ids, self.chunk_size)
        keys = [
            {
                "chunk_hash_hex": hashes[i].hex(),
                "model_name": request.model_name,
                "kv_rank": kv_rank(self.world_size, worker),
                "object_group_id": 0,
                "cache_salt": request.salt,
            }
            for worker in (range(self.world_size) if worker is None else (worker,))
            for i in chunks
        ]
        body = {"tier": "l1", "force": force, "keys": keys}
        answer = self.http.json("DELETE", "/cache/objects", json=body, timeout=CLEANUP_SECONDS)
        try:
            return int(answer["deleted"]), int(answer["skipped"])
        except (KeyError, TypeError, ValueError) as exc:
            raise ProtocolError(f"DELETE /cache/objects answered without a count: {exc!r}") from exc

    def is_registered(self) -> bool:
        """Whether lookups of the model can hit at all: an engine or this session has it registered."""
        status = self.http.json("GET", "/status")
        mine = registered_clients(status).get(self.instance_id) == self.name
        return mine and (self.name == self.connection.model_name or self.connection.model_name in engine_models(status))

    def memory(self) -> tuple[int, int]:
        """``(used, total)`` bytes of the server's pool."""
        status = self.http.json("GET", "/status")
        try:
            manager = status["storage_manager"]["l1_manager"]
            return int(manager["memory_used_bytes"]), int(manager["memory_total_bytes"])
        except (KeyError, TypeError, ValueError) as exc:
            raise ProtocolError(f"the server's /status lacks {exc}") from exc

    def refresh(self, deadline: Deadline) -> None:
        """Tell the server that this instance lives. Re-registering is the ping that publishes nothing."""
        self._register(deadline)

    def take_owed(self) -> list[Call]:
        """What could not be given back because the server did not answer; for `clean_up` of the next session."""
        owed, self._owed = self._owed, []
        return [] if self._rpc is None or self._rpc.lost() else owed  # a server that has gone has forgotten it

    def close(self) -> None:
        """Un-register and close everything; safe to call twice, and in a forked child."""
        self.settle_posted()
        rpc, self._rpc = self._rpc, None
        if self.pid != os.getpid():
            return  # sockets and registration belong to the parent
        if rpc is not None:
            # Un-registering publishes a pending reservation as if it were written; left alone, it expires.
            if self._registered and not self._reserving:
                self._clean_up(rpc, [("unregister", (self.instance_id,))])
            if self._owed:
                self._tried("clean-up", lambda rpc: rpc.post(self._owed), rpc)  # the last chance, without waiting
            rpc.close()
        self.http.close()
        if self.pool is not None:
            self.pool.close()

    def _check_peer(self, deadline: Deadline) -> None:
        chunk_size = self.call("get_chunk_size", result=int, deadline=_shorter(deadline))
        if chunk_size != self.chunk_size:
            raise UnsupportedServer(
                f"{self.connection.url} has chunks of {chunk_size} tokens, {self.http.url} of {self.chunk_size}: "
                "the two URLs belong to different servers"
            )

    def _register(self, deadline: Deadline) -> None:
        layout = self.shard
        registration = Registration(
            instance_id=self.instance_id,
            model_name=self.name,
            world_size=self.world_size,
            block_size=layout.block_size or self.chunk_size,
            num_layers=layout.num_layers,
            hidden_dim_size=layout.chunk_shape(self.chunk_size)[-1],
            dtype_str=dtype_name(layout.dtype),
            use_mla=layout.fused,
            num_physical_slots=self.chunk_size,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            packing=layout.packing,
        )
        self._registered = True  # from here on it may be, whatever becomes of the reply
        try:
            reply = self.call("register", registration, result=Registered, deadline=_shorter(deadline))
        except ServerTimeout as exc:
            raise UnsupportedServer(
                f"{self.connection.url} answers, but not to a registration: start the server with "
                "--supported-transfer-mode auto"
            ) from exc
        if reply is not None and reply.shm_name and reply.pool_size and self.pool is None:
            try:
                self.pool = MappedPool(reply.shm_name, reply.pool_size, self.connection.prefault)
            except (OSError, ValueError) as exc:
                raise PoolNotMappable(
                    f"the server keeps its cache in shared memory, which cannot be opened: {exc}. "
                    "Run on the same host as the same user (containers: --ipc=host), or start the server without "
                    "--shm-name"
                ) from exc

    def clean_up(self, calls: Sequence[Call], wait: bool = True) -> None:
        """Operations that give something back to the server. Never raises; waits briefly or not at all."""
        if calls and self._rpc is not None and self.pid == os.getpid():
            self._clean_up(self._rpc, calls, wait)

    def settle_posted(self) -> None:
        """Wait until the server has done what `clean_up` did not wait for. Never raises."""
        if self._rpc is not None and self.pid == os.getpid():
            self._tried("clean-up", lambda rpc: rpc.settle(Deadline(CLEANUP_SECONDS)), self._rpc)

    def _clean_up(self, rpc: Rpc, calls: Sequence[Call], wait: bool = True) -> None:
        if self._stale and not rpc.lost():
            # Not now: a server that is only slow has not even done yet what is to be undone.
            self._owed += calls
            return
        # A server's workers may overtake each other: a release after its session's end begins the session anew.
        ends = [call for call in calls if call[0] == "end_session"]
        releases = [call for call in calls if call[0] != "end_session"]

        def give_back(rpc: Rpc) -> None:
            if not wait:
                rpc.post(releases or ends, ends if releases else ())
                return
            for now in (releases, ends):
                rpc.call_many(now, object, Deadline(CLEANUP_SECONDS))

        self._tried(", ".join(sorted({operation for operation, _ in calls})), give_back, rpc)

    def _tried(self, names: str, action: Callable[[Rpc], None], rpc: Rpc) -> None:
        if rpc.lost():
            return
        try:
            action(rpc)
        except KVCacheSDKError as exc:
            self.mark_stale()
            log.warning("%s failed during clean-up (%s); the server drops the leftovers by itself", names, exc)


def _shorter(deadline: Deadline) -> Deadline:
    return Deadline(min(deadline.remaining(), _HANDSHAKE_SECONDS))


def _resolve(info: ServerInfo, connection: Connection, known: KVLayout | None) -> tuple[KVLayout, bool]:
    """The model's layout, and whether a serving engine has it registered."""
    name = connection.model_name
    if name in info.engines:
        return published_layout(info.engines[name], connection), True
    layout = connection.layout or info.layouts.get(name) or known
    if layout is not None:
        return layout, False
    names = info.model_names()
    if name in names:
        raise ModelNotRegistered(
            f"{name!r} was registered by a client that publishes no geometry; pass layout=KVLayout(...)"
        )
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    engines = sorted(info.engines)
    if close:
        hint = f"; did you mean {close[0]!r}?"
    elif len(engines) == 1:  # an engine registers the model's folder or id, whatever name it serves it under
        hint = f". The only engine's is {engines[0]!r}; vLLM's --served-model-name is not known here."
    else:
        hint = "."
    raise ModelNotRegistered(
        f"{name!r} is not registered at {connection.http_url} (registered: {', '.join(names) or 'none'}){hint} "
        "Use the name the engine was started with, or pass layout=KVLayout(...) when no engine runs"
    )
