"""`KVEventStream`: the server's KV events of one model, through lost connections and restarts.

A subscription is a stream of batches on a socket of its own; the server sends the next one when the last was
acknowledged. It drops a subscriber that is silent for its reap timeout, so we ping. (Pings are dangerous for an
instance that stores; this one only listens and is registered nowhere.)
"""

from __future__ import annotations

import logging
import secrets
import time
from types import TracebackType

import msgspec
import zmq

from kvdata.client.connection import Connection
from kvdata.client.deadline import Deadline
from kvdata.client.discovery import EventSettings, event_settings
from kvdata.client.http import Http
from kvdata.errors import (
    ConnectionLost,
    InvalidRequest,
    ProtocolError,
    ServerTimeout,
    ServerUnreachable,
    UnsupportedServer,
)
from kvdata.wire.messages import ACK, CANCEL, SUBSCRIBE, KVEventBatch, decode, operation_numbers

log = logging.getLogger("kvdata")

_HANDSHAKE_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_PING_SECONDS = 30.0  # where the server drops nobody, only to notice that it hangs
_FLUSH_MS = 200
_BATCH = 256  # events; of 256 tokens each, 0.3 MB


class KVEventStream:
    """Batches of KV events from the beginning of the server's log; use it with ``with``, or `close` it.

    After a lost connection it subscribes again where it was; after a restart of the server (the batches' incarnation
    changes) from the beginning. Not thread-safe, and not to be used in a forked child.

    Args:
        connection: where the server is and which model is meant. Its timeout is also how long the server may be away.

    Raises:
        UnsupportedServer: the server is older than 0.5.6 or has no KV events.
        ServerError: as other operations.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._instance_id = secrets.randbits(62)
        self._cursor = 0
        self._incarnation: int | None = None
        self._http = Http(connection.http_url, min(connection.timeout, _HANDSHAKE_SECONDS))
        self._subscription: _Subscription | None = None
        try:
            self._first: KVEventBatch | None = self._subscribe(Deadline(connection.timeout))
        except BaseException:
            self.close()
            raise

    def poll(self, seconds: float) -> KVEventBatch | None:
        """The next batch, or None when there is none within ``seconds``.

        Takes longer while the server is away: up to the connection's timeout, then `ServerUnreachable` or
        `ServerTimeout`. `UnsupportedServer` when it came back without KV events.
        """
        if self._subscription is None:
            raise InvalidRequest("this stream of KV events is closed; open another")
        batch, self._first = self._first, None
        if batch is None:
            try:
                batch = self._subscription.next(seconds)
            except (ConnectionLost, ServerTimeout) as exc:
                log.info("the stream of KV events broke off (%s); subscribing again", exc)
                batch = self._subscribe_again()
        if batch is not None:
            self._cursor, self._incarnation = batch.next_cursor, batch.incarnation
        return batch

    def close(self) -> None:
        """Cancel the subscription and close its socket; safe to call twice."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
        self._http.close()

    def __enter__(self) -> KVEventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _subscribe_again(self) -> KVEventBatch:
        deadline = Deadline(self.connection.timeout)
        while True:
            try:
                return self._subscribe(deadline)
            except (ServerUnreachable, ServerTimeout, ProtocolError):  # also what a server says that is just starting
                if deadline.remaining() < _RETRY_SECONDS:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _subscribe(self, deadline: Deadline) -> KVEventBatch:
        """Subscribe at the cursor and return the first batch, which a server sends at once."""
        # Each time: it may have come back as another release, for which the operation would be fatal.
        settings = event_settings(self._http)
        batch = self._subscribe_at(self._cursor, settings, deadline)
        if self._incarnation not in (None, batch.incarnation):
            # The cursor was one of the old log, and may lie anywhere in the new one.
            batch = self._subscribe_at(0, settings, deadline)
        return batch

    def _subscribe_at(self, cursor: int, settings: EventSettings, deadline: Deadline) -> KVEventBatch:
        previous, self._subscription = self._subscription, None
        if previous is not None:
            previous.close()
        patience = Deadline(min(deadline.remaining(), _HANDSHAKE_SECONDS))
        self._subscription = _Subscription(self.connection, self._instance_id, settings)
        batch = self._subscription.start(cursor, patience)
        if not batch.enabled:
            raise UnsupportedServer(f"{self.connection.url} records no KV events; see its --kv-event-log-size")
        return batch


class _Subscription:
    """One subscription on one socket; it ends with the connection, and when the server ends it."""

    def __init__(self, connection: Connection, instance_id: int, settings: EventSettings) -> None:
        self._url, self._model = connection.url, connection.model_name
        self._instance_id = instance_id
        self._ping_every = settings.reap_seconds / 3 or _PING_SECONDS
        self._ping_operation = msgspec.msgpack.encode(operation_numbers(settings.release)["ping"])
        self._patience = connection.timeout
        self._uid, self._ping_uid = msgspec.msgpack.encode(0), msgspec.msgpack.encode(1)
        self._heard = self._pinged = time.monotonic()
        self._zmq = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._zmq.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # no request waits for a dead server's successor
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(self._url)
        except zmq.ZMQError as exc:
            self.close()
            raise InvalidRequest(f"{self._url!r} is not a usable ZMQ URL: {exc}") from exc

    def start(self, cursor: int, deadline: Deadline) -> KVEventBatch:
        """Ask for the events after ``cursor``; the first batch tells how things stand, and may hold none."""
        if not self._socket.poll(int(1000 * deadline.remaining()), zmq.POLLOUT):
            raise ServerUnreachable(
                f"no server accepts connections at {self._url} (ZMQ, waited {deadline.seconds:.1f} s); is it running, "
                "and is this the port of its --port option?"
            )
        arguments = (SUBSCRIBE, self._instance_id, self._model, cursor, _BATCH)
        self._socket.send_multipart([self._uid, *map(msgspec.msgpack.encode, arguments)])
        batch = self.next(deadline.remaining())
        if batch is None:
            raise ServerTimeout(f"{SUBSCRIBE}: no answer from {self._url} within {deadline.seconds:g} s; see its log")
        return batch

    def next(self, seconds: float) -> KVEventBatch | None:
        """The next batch within ``seconds``.

        Raises `ConnectionLost` when the connection or the server ended the stream, `ServerTimeout` when not even a
        ping is answered.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        deadline = Deadline(seconds)
        while True:
            self._ping()
            wait = min(deadline.remaining(), self._ping_every)
            ready = dict(poller.poll(int(1000 * wait) + (wait > 0)))
            if self._socket in ready:
                batch = self._take(self._socket.recv_multipart())
                if batch is not None:
                    return batch
            elif self._monitor in ready:
                raise ConnectionLost(f"the server at {self._url} went away")
            elif self._heard < self._pinged < time.monotonic() - self._patience:
                raise ServerTimeout(f"{self._url} has not answered a ping within {self._patience:g} s")
            elif not deadline.remaining():
                return None

    def close(self) -> None:
        """Cancel and close; what the server still sends goes nowhere."""
        if self._socket.poll(0, zmq.POLLOUT):
            self._socket.send_multipart([self._uid, b"", CANCEL])
        self._socket.disable_monitor()
        self._zmq.destroy(linger=_FLUSH_MS)

    def _ping(self) -> None:
        """Ping when it is time to and the last one was answered. Acknowledgements are no sign of life to the server."""
        if self._pinged <= self._heard and time.monotonic() - self._pinged > self._ping_every:
            self._send([self._ping_uid, self._ping_operation, msgspec.msgpack.encode(self._instance_id)])
            self._pinged = time.monotonic()

    def _take(self, frames: list[bytes]) -> KVEventBatch | None:
        self._heard = time.monotonic()
        if frames[0] != self._uid:
            return None  # the answer to a ping
        if len(frames) < 3:
            raise ConnectionLost(f"the server at {self._url} ended the stream, as it does with a silent subscriber")
        try:
            batch = decode(frames[2], KVEventBatch)
        except ProtocolError as exc:
            raise ProtocolError(f"{SUBSCRIBE}: {self._url} sent a batch that is none: {exc}") from exc
        self._send([self._uid, b"", ACK])  # now, so that the next one is on its way meanwhile
        return batch

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again as exc:
            raise ConnectionLost(f"the server at {self._url} went away") from exc
