"""ZMQ face of the embedded server: requests as frames to calls of the service, and results back."""

from __future__ import annotations

import logging
import threading
import time
import typing
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from kvdata.errors import ProtocolError
from kvdata.server.service import Service
from kvdata.wire.messages import NEWEST, operation_numbers

log = logging.getLogger("kvdata.server")

POLL_MS = 50
TICK_SECONDS = 1.0
SEND_QUEUE = 100_000  # replies that a client may leave unread before further ones are dropped
FRAME_BYTES = (1 << 32) + 4096  # what msgpack can express; a frame that claims more ends its connection
_LOGGED = 300  # characters of what was wrong with a request


class Dispatcher:
    """Answers requests with a `Service`, whose annotations are the wire types of the arguments."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._operations: dict[int, tuple[str, list[msgspec.msgpack.Decoder[Any]]]] = {}
        for name, number in operation_numbers(NEWEST).items():
            types = typing.get_type_hints(getattr(service, name))
            types.pop("return")
            # Like the real server: for a plain int or bool, a string that reads as one will do.
            decoders = [msgspec.msgpack.Decoder(t, strict=t not in (int, bool)) for t in types.values()]
            self._operations[number] = (name, decoders)

    def answer(self, frames: Sequence[bytes]) -> list[bytes] | None:
        """Reply to ``[uid, operation, argument, ...]``; None, and a line in the log, whatever is wrong."""
        name = "request"
        try:
            uid, operation, *arguments = frames
            name, decoders = self._operations[msgspec.msgpack.decode(operation, type=int)]
            if len(arguments) != len(decoders):
                raise ProtocolError(f"{len(arguments)} arguments where {len(decoders)} are expected")
            decoded = [d.decode(argument) for d, argument in zip(decoders, arguments, strict=True)]
            with self._service.lock:
                result = getattr(self._service, name)(*decoded)
            return [uid, operation] if result is None else [uid, operation, msgspec.msgpack.encode(result)]
        except Exception as exc:  # clients may send anything, and must not be able to stop the server
            log.warning("%s not answered: %s: %.*s", name, type(exc).__name__, _LOGGED, exc)
            return None

    def run(self, router: zmq.Socket[bytes], stopping: threading.Event) -> None:
        """Answer until ``stopping``, and call the service's tick once a second."""
        next_tick = time.monotonic()
        while not stopping.is_set():
            if router.poll(POLL_MS):
                client, *frames = router.recv_multipart()
                reply = self.answer(frames)
                if reply is not None:
                    router.send_multipart([client, *reply])  # never blocks: a ROUTER drops what cannot go out
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                with self._service.lock:
                    self._service.tick()
