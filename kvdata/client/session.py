"""`Session`: one registration of one process with one incarnation of a server, and its raw operations.

A session is thrown away as a whole when the server restarts, when its pool is replaced, or after a fork.
The wire document's traps are dealt with here: see the comments.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvdata.client.admin import is_served
from kvdata.client.claims import Claims
from kvdata.client.connection import Connection
from kvdata.client.deadline import Deadline
from kvdata.client.discovery import discover, registered_world_size
from kvdata.client.http import Http
from kvdata.client.leftovers import CLEANUP_SECONDS, Leftovers
from kvdata.client.request import Request
from kvdata.client.resolve import resolve
from kvdata.client.rpc import Call, Rpc
from kvdata.errors import (
    ConnectionLost,
    PoolNotMappable,
    ProtocolError,
    ServerTimeout,
    UnsupportedLayout,
    UnsupportedServer,
)
from kvdata.layout import KVLayout, dtype_name
from kvdata.wire.messages import Registered, Registration
from kvdata.wire.shm import MappedPool

T = TypeVar("T")

_HANDSHAKE_SECONDS = 10.0
_FREES_PARTIAL_CHUNKS = (0, 5, 6)
_FREES_ITS_OWN = (0, 5, 5)  # older ones release whatever is locked of the range, others' locks too


class Session:
    """Registers with the server on creation; `close` un-registers, once nobody uses it any more.

    Args:
        connection: where and what.
        known_layout: geometry learnt in an earlier session, used when nothing on the server says it any more.
        predecessor: the session before this one, with the same server or another.
        left: takes what a handshake that broke off may have left on the server, with the server's run: for the
            next session to give back.
        deadline: of the handshake; by default the connection's time-out.
    """

    def __init__(
        self,
        connection: Connection,
        known_layout: KVLayout | None = None,
        predecessor: Session | None = None,
        deadline: Deadline | None = None,
        left: list[tuple[str | None, Call]] | None = None,
    ) -> None:
        self.connection = connection
        self.pid = os.getpid()
        self.pool: MappedPool | None = None
        self._registered = False
        self._stale = threading.Event()
        self.claims = Claims(self)
        self._users, self._closing, self._counting = 0, False, threading.Lock()
        self._successor: Session | None = None
        deadline = deadline or Deadline(connection.timeout)
        self.http = Http(connection.http_url, min(connection.timeout, _HANDSHAKE_SECONDS))
        self._rpc: Rpc | None = None
        try:
            self.info = discover(self.http, deadline)
            self.layout, served = resolve(self.info, connection, known_layout)
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
            self.leftovers = Leftovers(self._rpc, self._stale, self.frees_its_own)
            if self.chunk_size % (self.layout.block_size or 1):
                raise UnsupportedLayout(
                    f"{connection.http_url} has chunks of {self.chunk_size} tokens, which are not whole blocks of "
                    f"{self.layout.block_size}; start it with another --chunk-size"
                )
            self._check_peer(deadline)
            self._register(deadline)
            if predecessor is not None:
                self._check_pool(predecessor)
        except BaseException:
            if left is not None and self._registered and self._rpc is not None and self._rpc.lost():
                left.append((self.info.incarnation, self._unregister()))
            self.close()
            raise

    @property
    def chunk_size(self) -> int:
        """Tokens in a chunk."""
        return self.info.chunk_size

    @property
    def frees_its_own(self) -> bool:
        """Whether `free_lookup_locks` releases what that request has locked, and nothing else."""
        return self.info.release >= _FREES_ITS_OWN

    def request(self, ids: Sequence[int], salt: str) -> Request:
        """A new request for the connection's model."""
        until = time.monotonic() + self.info.read_ttl_seconds
        return Request.create(self.connection.model_name, self.world_size, salt, self.chunk_size, ids, until)

    def hold(self) -> None:
        """Keep it open until `release`: un-registering would publish what another thread is writing."""
        with self._counting:
            self._users += 1

    def release(self) -> None:
        """The end of one `hold`."""
        with self._counting:
            self._users -= 1
            last = self._closing and not self._users
        if last:
            self.end()

    @contextmanager
    def held(self) -> Iterator[Session]:
        """`hold` and `release` around a block."""
        self.hold()
        try:
            yield self
        finally:
            self.release()

    def call(self, operation: str, *args: Any, result: type[T], deadline: Deadline) -> T:
        """One operation on the wire; `ProtocolError` when its answer is null."""
        return self.told(operation, self.call_many([Call(operation, args)], result, deadline)[0])

    def wire(self, operation: str) -> Rpc:
        """The connection; `ConnectionLost` names the operation where it was closed."""
        if self._rpc is None:
            raise ConnectionLost(f"{operation}: the connection to {self.connection.url} was closed; call again")
        return self._rpc

    def told(self, operation: str, answer: T | None) -> T:
        """An answer; `ProtocolError` for null, where that means nothing."""
        if answer is None:
            raise ProtocolError(f"{operation}: {self.connection.url} answered nothing; see the server's log")
        return answer

    def usable(self) -> bool:
        """False when the process forked, the server went away, or another pool took the name."""
        if self._stale.is_set() or self.pid != os.getpid() or self._rpc is None or self._rpc.lost():
            return False
        return self.pool is None or self.pool.is_current()

    def mark_stale(self) -> None:
        """Make the next operation shake hands anew."""
        self._stale.set()

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
        """Several operations, in flight together; None is the protocol's null."""
        if not calls:
            return []
        with self.waiting():
            return self.wire(calls[0].operation).call_many(calls, result, deadline)

    def lookup(self, requests: Sequence[Request], deadline: Deadline) -> list[int]:
        """Leading chunks that the server holds of each; they stay read-locked until retrieved or released.

        After an error it is unknown which were locked.
        """
        self.call_many([Call("lookup", (r.key(worker=None), 1)) for r in requests], type(None), deadline)
        hits: dict[str, int] = {}
        # Short polls: the server's own blocking wait would hold the only worker its engines share.
        for attempt in itertools.count():
            waiting = [r for r in requests if r.request_id not in hits]
            if attempt and not deadline.remaining():
                raise ServerTimeout(
                    f"lookup: {self.connection.url} is still loading after {deadline.seconds:g} s; give it more with "
                    "timeout="
                )
            answers = self.call_many([Call("query_prefetch_status", (r.request_id,)) for r in waiting], int, deadline)
            for request, hit in zip(waiting, answers, strict=True):
                if hit is not None:
                    if not 0 <= hit <= request.chunks:
                        raise ProtocolError(
                            f"lookup of {request.chunks} chunks: {self.connection.url} answered {hit}; see its log"
                        )
                    hits[request.request_id] = hit
            if len(hits) == len(requests):
                break
            time.sleep(min(0.02, 0.0005 * 2**attempt, deadline.remaining()))
        found = [hits[r.request_id] for r in requests]
        if self.world_size > 1 and self.info.release < _FREES_PARTIAL_CHUNKS:
            # There the shares that are there of the first missing chunk are locked, too.
            short = [(r, hit) for r, hit in zip(requests, found, strict=True) if hit < r.chunks]
            self.leftovers.give_back([r.free(hit, hit + 1) for r, hit in short])
        return found

    def refresh(self, deadline: Deadline) -> None:
        """Tell the server that this instance lives. Re-registering is the ping that publishes nothing.

        Where an engine has come since under the same name, its layout must stay as it is: the session is stale then.
        """
        if self.name == self.connection.model_name and is_served(self, deadline):
            self.mark_stale()
        else:
            self._register(deadline)

    def close(self, successor: Session | None = None) -> None:
        """`end`, as soon as nobody uses it; the successor gives back what it still holds on the server then."""
        self._successor = successor
        with self._counting:
            self._closing = True
            if self._users:
                return
        self.end()

    def end(self) -> None:
        """Un-register and close everything; safe to call twice, and in a forked child."""
        if self.pid != os.getpid():
            return  # sockets and registration belong to the parent
        if self._rpc is not None:
            self.leftovers.settle()
            self._hand_over(self._rpc, self._successor)
            self.claims.abort_all()
        rpc, self._rpc = self._rpc, None
        if rpc is not None:
            # Un-registering publishes a pending reservation as if it were written; left alone, it expires.
            if self._registered and not self.claims:
                self.leftovers.give_back([self._unregister()])
            self.leftovers.last_chance()
            rpc.close()
        self.http.close()
        if self.pool is not None:
            self.pool.close()

    def _unregister(self) -> Call:
        return Call("unregister", (self.instance_id,))

    def _hand_over(self, rpc: Rpc, successor: Session | None) -> None:
        """What cannot be given back over this connection, before this instance is un-registered: it is in its name."""
        same_run = successor is not None and successor.info.incarnation == self.info.incarnation
        if successor is not None and same_run:
            self.leftovers.unanswered_to(successor.leftovers)
        elif self.usable():
            self.leftovers.finish(Deadline(CLEANUP_SECONDS))
        if successor is None:
            return
        owed = self.leftovers.taken()
        if rpc.lost():
            if not same_run or self.info.incarnation is None:
                return  # another server has taken the place of this one: it knows nothing of it
            if self._registered and not self.claims:
                self._registered = False
                owed.append(self._unregister())
        successor.leftovers.give_back(owed)

    def _check_peer(self, deadline: Deadline) -> None:
        chunk_size = self.call("get_chunk_size", result=int, deadline=deadline.shorter(_HANDSHAKE_SECONDS))
        if chunk_size != self.chunk_size:
            raise UnsupportedServer(
                f"{self.connection.url} has chunks of {chunk_size} tokens, {self.http.url} of {self.chunk_size}: "
                "the two URLs belong to different servers"
            )

    def _check_pool(self, before: Session) -> None:
        """A server keeps its pool as long as it runs. A new one under the old name is somebody else's."""
        same_run = before.info.incarnation is not None and before.info.incarnation == self.info.incarnation
        if same_run and self.pool and before.pool and self.pool.identity != before.pool.identity:
            raise PoolNotMappable(
                f"the shared memory {self.pool.path.name!r} of {self.connection.url} was replaced while that server "
                "runs; see whether another server was started with its --shm-name, and start it again"
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
            reply = self.call(
                "register", registration, result=Registered, deadline=deadline.shorter(_HANDSHAKE_SECONDS)
            )
        except ServerTimeout as exc:
            raise UnsupportedServer(
                f"{self.connection.url} answers, but not to a registration: start the server with "
                "--supported-transfer-mode auto"
            ) from exc
        if reply.shm_name and reply.pool_size and self.pool is None:
            try:
                self.pool = MappedPool(reply.shm_name, reply.pool_size, self.connection.prefault)
            except (OSError, ValueError) as exc:
                raise PoolNotMappable(
                    f"{self.connection.url} keeps its cache in shared memory, which cannot be opened: {exc}. "
                    "Run on the same host as the same user (containers: --ipc=host), or start the server without "
                    "--shm-name"
                ) from exc
