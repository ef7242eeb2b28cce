"""Request and reply over one ZMQ DEALER socket, every wait under a deadline.

The server has no error reply: what it dislikes it answers with silence. So a call ends in one of four ways,
each its own error: nobody is connected (`ServerUnreachable`), the peer vanished while we waited
(`ConnectionLost`), silence until the deadline (`ServerTimeout`), or an answer that does not decode
(`ProtocolError`).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import zmq

from kvdata.client.deadline import Deadline
from kvdata.errors import (
    ConnectionLost,
    InvalidRequest,
    KVCacheSDKError,
    ProtocolError,
    ServerTimeout,
    ServerUnreachable,
)
from kvdata.wire.messages import NEWEST, Release, decode, operation_numbers

T = TypeVar("T")
# Gets the result frame of a reply that comes after its call has given up.
Late: TypeAlias = Callable[["bytes | None"], None]

# A live server on this host or rack accepts a TCP connection in milliseconds.
_CONNECT_SECONDS = 5.0
_FLUSH_MS = 200
# Deeper pipelines are no faster, and leave more unread in a server when a client is stopped.
_IN_FLIGHT = 32
_POSTED_SECONDS = 2.0


class Call(NamedTuple):
    """One request to the server.

    Attributes:
        operation: its name.
        args: what goes with it.
        until: when what it gives back has ended by itself, `time.monotonic`. A posted request is not sent any more
            then: a server counts locks without their owners, and would take another's instead.
    """

    operation: str
    args: tuple[Any, ...]
    until: float = math.inf


@dataclass
class _Group:
    """Posted requests, how many of them are unanswered, and the phases that follow them."""

    then: Sequence[Sequence[Call]]
    left: int


class Rpc:
    """One connection to the server's ZMQ port. Thread-safe: one thread's calls are on the wire at a time.

    Args:
        url: the server's ZMQ URL.
        release: the server's release, which decides the operation numbers.
    """

    def __init__(self, url: str, release: Release = NEWEST) -> None:
        self.url = url
        self._numbers = operation_numbers(release)
        self._lock = threading.Lock()
        self._uid = 0
        self._lost = False
        self._closing = False
        self._posted: dict[bytes, tuple[_Group, Call]] = {}
        self._backlog: deque[Sequence[Sequence[Call]]] = deque()
        self._late: dict[bytes, Late] = {}
        self._zmq = zmq.Context()
        try:
            self._open()
        except zmq.ZMQError as exc:
            self._zmq.destroy(linger=0)
            raise InvalidRequest(f"{url!r} is not a usable ZMQ URL: {exc}") from exc

    def _open(self) -> None:
        self._socket: zmq.Socket[bytes] = self._zmq.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Without this, requests to a dead server are kept and reach its successor.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(self.url)

    def call(
        self,
        operation: str,
        *args: Any,
        result: type[T],
        deadline: Deadline,
        late: Late | None = None,
        sent: Callable[[], None] | None = None,
    ) -> T | None:
        """Send one request and wait for its reply; None is the protocol's null. ``sent`` is told when it leaves."""
        return self.call_many([Call(operation, args)], result, deadline, late, sent)[0]

    def call_many(
        self,
        calls: Sequence[Call],
        result: type[T],
        deadline: Deadline,
        late: Late | None = None,
        sent: Callable[[], None] | None = None,
    ) -> list[T | None]:
        """Replies to several requests, which are in flight together; None is the protocol's null.

        Late replies of earlier requests that timed out are read and dropped on the way, so that they never
        pile up in the server. Where one call fails, so do all: which of them took effect is unknown then, unless
        its reply comes after all and ``late`` is told.
        """
        if not calls:
            return []
        with self._alone(calls[0].operation, deadline):
            frames = self._exchange(calls, deadline, late, sent)
        return [None if frame is None else self.decoded(calls[0].operation, frame, result) for frame in frames]

    def decoded(self, operation: str, frame: bytes, result: type[T]) -> T:
        """What a reply's result frame says; `ProtocolError` when it is not a ``result``."""
        try:
            return decode(frame, result)
        except ProtocolError as exc:
            raise ProtocolError(
                f"{operation}: {self.url} sent an answer that is none: {exc}; see the server's log, and whether kvdata "
                "knows its release"
            ) from exc

    def post(self, *phases: Sequence[Call]) -> None:
        """Send requests without waiting for their replies, each phase once all of the one before are answered.

        Where another thread has the connection, that thread sends them when it is done. Replies are read when
        something else is waited for, at the latest by `settle`.
        """
        self._backlog.append([phase for phase in phases if phase])
        self._send_backlog()

    def settle(self, deadline: Deadline) -> None:
        """Wait for the replies to all that was posted."""
        with self._alone("clean-up", deadline):
            self._post_backlog()
            self._settle(deadline)

    def take_unfinished(self) -> list[Call]:
        """What was posted and not sent yet, in its order; it is not waited for any more.

        And these requests themselves where the peer went away, for they may not have reached it, or where it does no
        harm to repeat them.
        """
        with self._holding("clean-up", Deadline(_POSTED_SECONDS)):
            posted, backlog = list(self._posted.values()), list(self._backlog)
            self._posted.clear()
            self._backlog.clear()
        phases = [*{id(group): group.then for group, _ in posted}.values(), *backlog]
        again = [call for _, call in posted if self._lost or call.operation == "end_session"]
        return again + [call for then in phases for phase in then for call in phase]

    def lost(self) -> bool:
        """True once the peer has gone away, even if another server has taken its place since."""
        # A socket is one thread's at a time. Whoever has it notices by himself.
        if not self._lost and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        return self._lost

    def _look(self) -> bool:
        if not self._lost and (self._zmq.closed or self._monitor.poll(0)):
            self._lost = True
        return self._lost

    def close(self) -> None:
        """Close the socket and end its I/O thread; where another thread is in a call, at the end of that."""
        self._closing = True
        self._end()

    def _end(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # its holder does it
        try:
            if not self._zmq.closed:
                self._socket.disable_monitor()
                # What was posted last must still leave; a stopped server's kernel takes it at once.
                self._zmq.destroy(linger=0 if self._lost else _FLUSH_MS)
        finally:
            self._lock.release()

    @contextmanager
    def _holding(self, operation: str, deadline: Deadline) -> Iterator[None]:
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise ServerTimeout(
                f"{operation}: another thread kept the connection to {self.url} for {deadline.seconds:g} s; give "
                "threads that share a context more time, or contexts of their own"
            )
        try:
            yield
        finally:
            self._lock.release()
            self._send_backlog()
            if self._closing:
                self._end()

    @contextmanager
    def _alone(self, operation: str, deadline: Deadline) -> Iterator[None]:
        with self._holding(operation, deadline):
            if self._zmq.closed:
                raise ConnectionLost(f"{operation}: the connection to {self.url} was closed meanwhile; call again")
            try:
                yield
            except zmq.ZMQError as exc:  # the peer went away between a look and a use
                self._lost = True
                raise ConnectionLost(f"{operation}: the connection to {self.url} broke ({exc}); call again") from exc

    def _send_backlog(self) -> None:
        """What others have posted while the connection was in use; a failure is noticed by the next call."""
        while self._backlog and not self._zmq.closed and self._lock.acquire(blocking=False):
            try:
                self._post_backlog()
            except (zmq.ZMQError, KVCacheSDKError):
                return
            finally:
                self._lock.release()

    def _post_backlog(self) -> None:
        while self._backlog:
            if len(self._posted) > _IN_FLIGHT:
                self._settle(Deadline(_POSTED_SECONDS))
            self._post(self._backlog[0])
            self._backlog.popleft()

    def _post(self, phases: Sequence[Sequence[Call]]) -> None:
        if phases:
            group = _Group(phases[1:], len(phases[0]))
            for call in phases[0]:
                if time.monotonic() < call.until:
                    self._posted[self._send(call, Deadline(_FLUSH_MS / 1000))] = group, call
                else:
                    self._done(group)

    def _settle(self, deadline: Deadline) -> None:
        while self._posted:
            self._answered(*self._receive("clean-up", deadline))

    def _answered(self, uid: bytes, *answer: bytes) -> None:
        """A reply that nobody waits for."""
        late = self._late.pop(uid, None)
        if late is not None:
            late(answer[1] if len(answer) > 1 else None)
        posted = self._posted.pop(uid, None)
        if posted is not None:
            self._done(posted[0])

    def _done(self, group: _Group) -> None:
        """One request less to wait for."""
        group.left -= 1
        if not group.left:
            self._post(group.then)

    def _send(self, call: Call, deadline: Deadline) -> bytes:
        operation, args, _ = call
        self._uid += 1
        uid = msgspec.msgpack.encode(self._uid)
        frames = [uid, msgspec.msgpack.encode(self._numbers[operation])]
        frames += [msgspec.msgpack.encode(arg) for arg in args]
        if self._look():
            raise ConnectionLost(f"{operation}: the server at {self.url} went away; call again")
        patience = min(deadline.remaining(), _CONNECT_SECONDS)
        if not patience:
            raise ServerTimeout(
                f"{operation}: not sent to {self.url}, the {deadline.seconds:.1f} s of the operation were used up; see "
                "the server's log, or give it more with timeout="
            )
        if not self._socket.poll(int(1000 * patience), zmq.POLLOUT):
            raise ServerUnreachable(
                f"{operation}: no server accepts connections at {self.url} (ZMQ, waited {patience:.1f} s); "
                "is it running, and is this the port of its --port option?"
            )
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except BaseException:
            # Interrupted between two frames: closing drops the torso, which the next request would be appended to.
            self._socket.disable_monitor()  # forgets its socket, and does not close it
            self._monitor.close(0)
            self._socket.close(0)
            self._posted.clear()
            self._late.clear()
            self._open()
            raise
        return uid

    def _exchange(
        self, calls: Sequence[Call], deadline: Deadline, late: Late | None, sent: Callable[[], None] | None
    ) -> list[bytes | None]:
        """Result frames of ``calls``; replies may come in any order."""
        places: dict[bytes, int] = {}  # of what is in flight
        frames: list[bytes | None] = [None] * len(calls)
        unsent = iter(enumerate(calls))
        left = len(calls)
        try:
            while left:
                for place, call in itertools.islice(unsent, _IN_FLIGHT - len(places)):
                    places[self._send(call, deadline)] = place
                    if sent is not None:
                        sent()
                uid, *answer = self._receive(calls[0].operation, deadline)
                if uid in places:
                    frames[places.pop(uid)] = answer[1] if len(answer) > 1 else None
                    left -= 1
                else:
                    self._answered(uid, *answer)
        except BaseException:
            if late is not None:
                self._late.update(dict.fromkeys(places, late))
            raise
        return frames

    def _receive(self, operation: str, deadline: Deadline) -> list[bytes]:
        """The next reply, whoever it is for."""
        while True:
            remaining = deadline.remaining()
            ready = dict(self._poller.poll(int(1000 * remaining) + 1))
            if self._socket in ready:
                return self._socket.recv_multipart()
            if self._monitor in ready:
                self._lost = True
                raise ConnectionLost(f"{operation}: the server at {self.url} went away before it answered; call again")
            if not remaining:
                raise ServerTimeout(
                    f"{operation}: no answer from {self.url} within {deadline.seconds:g} s; whether it took effect "
                    "is unknown. A server answers an operation it does not serve with silence: see its log"
                )
