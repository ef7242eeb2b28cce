"""`Sessions`: the one session that a context has at a time, made anew when it must be, and what is done over it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import TypeVar

from kvdata.client.connection import Connection
from kvdata.client.deadline import Deadline
from kvdata.client.naming import named
from kvdata.client.rpc import Call
from kvdata.client.session import Session
from kvdata.client.transfer import Vanished
from kvdata.errors import ConnectionLost, InvalidRequest, ServerTimeout

T = TypeVar("T")

_ATTEMPTS = 3


@dataclass
class Stats:
    """Counters of one context since it was made, in one process."""

    lookups: int = 0
    hits: int = 0
    partial_hits: int = 0
    misses: int = 0
    retrieved_tokens: int = 0
    retrieved_bytes: int = 0
    stores: int = 0
    stored_chunks: int = 0
    deduplicated_chunks: int = 0
    stored_bytes: int = 0
    handshakes: int = 0


class Sessions:
    """Hands out the session; shakes hands at first use, after a fork, and after the server restarted. Thread-safe.

    Args:
        connection: where the server is and which model is meant.

    Attributes:
        connection: the same, or what replaced it.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._layout = connection.layout
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._before: Session | None = None  # the last one that there was
        self._finalizer: Finalize | None = None
        self._aside: list[tuple[Session, Finalize]] = []  # of a server that does not answer: not closed yet
        self._left: list[tuple[str | None, Call]] = []  # by handshakes that broke off
        self._used = time.monotonic()
        self._closed = False
        self._stats = Stats()

    def _here(self) -> None:
        """Begin anew after a fork: the parent's sockets and locks are not ours."""
        if self._pid != os.getpid():
            self._begin()

    @property
    def stats(self) -> Stats:
        """What the context's operations and its handshakes did in this process."""
        self._here()
        return self._stats

    def current(self) -> Session:
        """The session, within the connection's time-out."""
        deadline = Deadline(self.connection.timeout)
        with named("connect", self.connection), self._held("connect", deadline) as session:
            return session

    def attempt(self, operation: str, action: Callable[[Session, Deadline], T]) -> T:
        """Run ``action``; again when the server turned out to have gone away, restarted or lost chunks meanwhile."""
        deadline = Deadline(self.connection.timeout)
        with named(operation, self.connection):
            for left in reversed(range(_ATTEMPTS)):
                try:
                    with self._held(operation, deadline) as session:
                        return action(session, deadline)
                except (ConnectionLost, Vanished) as exc:
                    if deadline.remaining() and left:
                        continue
                    if isinstance(exc, ConnectionLost) and deadline.remaining():
                        raise
                    raise ServerTimeout(
                        f"{operation}: {exc} ({_ATTEMPTS - left} times within {deadline.seconds:g} s); retry later"
                    ) from exc
        raise AssertionError("unreachable")

    def settle(self) -> None:
        """Wait for the replies to what was sent without waiting for them. Never raises."""
        self._here()
        with self._lock:
            if self._session is not None:
                self._session.leftovers.settle()

    def close(self) -> None:
        """Un-register and close; `current` and `attempt` raise `InvalidRequest` afterwards. Twice is harmless."""
        self._here()
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
            if self._finalizer is not None:
                self._finalizer.cancel()
            if session is not None:
                session.close()
            self._close_aside()

    @contextmanager
    def _held(self, operation: str, deadline: Deadline) -> Iterator[Session]:
        """The session, which is not closed inside the block."""
        self._here()
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise ServerTimeout(
                f"{operation}: another thread was connecting to {self.connection.url} for {deadline.seconds:g} s; see "
                "the server's log"
            )
        try:
            session = self._connected(deadline)
            session.hold()
        finally:
            self._lock.release()
        try:
            yield session
        finally:
            session.release()

    def _connected(self, deadline: Deadline) -> Session:
        """The session, after a handshake if there is none that is good. The caller holds the lock."""
        if self._closed:
            raise InvalidRequest("this context is closed; connect again")
        if self._session is not None and not self._awake(self._session, deadline):
            self._set_aside()
        if self._session is None:
            self._session = session = Session(self.connection, self._layout, self._before, deadline, self._left)
            self._before = session
            self._layout = session.layout
            self._stats.handshakes += 1
            # atexit does not run in forked DataLoader workers; multiprocessing's finalizers do.
            self._finalizer = Finalize(self, session.end, exitpriority=10)
            left, run = list(self._left), session.info.incarnation
            self._left.clear()
            session.leftovers.give_back([call for of, call in left if run is not None and of == run])
            self._close_aside(session)
        self._session.leftovers.finish(Deadline(0))
        self._used = time.monotonic()
        return self._session

    def _awake(self, session: Session, deadline: Deadline) -> bool:
        """Whether it can be used, after a sign of life where the server might forget it soon."""
        usable = session.usable()
        if usable and time.monotonic() - self._used > session.info.grace_seconds / 2:
            session.refresh(deadline)
            usable = session.usable()
        return usable

    def _set_aside(self) -> None:
        """Put the session away. What a server has not read yet of a connection is lost when that is closed."""
        session, finalizer = self._session, self._finalizer
        self._session = self._finalizer = None
        if session is not None and finalizer is not None:
            self._aside.append((session, finalizer))

    def _close_aside(self, successor: Session | None = None) -> None:
        """Close them, now that the server answers again, or that this context ends."""
        while self._aside:
            session, finalizer = self._aside.pop()
            finalizer.cancel()
            session.close(successor)
