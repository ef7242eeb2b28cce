"""A proxy between clients and a server's ZMQ port that does to single messages what networks and servers do.

It works on the TCP stream, so that both sides see a connection end when it ends, as they would without it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from kvdata.wire.messages import Release, operation_numbers
from tests.faults.zmtp import Message, Stream

Fault = Callable[[Message], list[Message]]  # what is delivered instead of a message

PATIENCE = 30.0  # for what must happen


@dataclass
class _Rule:
    reply: bool
    operation: str
    fault: Fault
    times: int


class Gate:
    """Holds the messages that come to it. A named point: ``after prepare_store`` is a gate at its replies."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()

    def __call__(self, message: Message) -> list[Message]:
        self._reached.set()
        self._opened.wait(2 * PATIENCE)
        return [message]

    def wait(self) -> None:
        """Until a message is held."""
        assert self._reached.wait(PATIENCE), "no such message came"

    def open(self) -> None:
        """Let everything pass, now and later."""
        self._opened.set()


class Proxy:
    """Listens on a port of its own; `url` is what a client is given instead of the server's.

    Args:
        target: ZMQ URL of the server.
        release: its release, for the operation numbers.
    """

    def __init__(self, target: str, release: Release) -> None:
        self._target = (urlsplit(target).hostname, urlsplit(target).port)
        self._names = {number: name for name, number in operation_numbers(release).items()}
        self._rules: list[_Rule] = []
        self._gates: list[Gate] = []
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = {threading.Thread(target=self._accept, daemon=True)}
        for thread in self._threads:
            thread.start()

    def requests(self, operation: str, fault: Fault, times: int = 1) -> None:
        """Do this to the next ``times`` requests of an operation (``"*"``: of any)."""
        self._add(_Rule(False, operation, fault, times))

    def replies(self, operation: str, fault: Fault, times: int = 1) -> None:
        """Do this to the next ``times`` replies to an operation."""
        self._add(_Rule(True, operation, fault, times))

    def gate(self, where: str, operation: str) -> Gate:
        """Hold the next message ``before`` (its request) or ``after`` (its reply) an operation."""
        gate = Gate()
        self._gates.append(gate)
        self._add(_Rule(where == "after", operation, gate, 1))
        return gate

    def heal(self) -> None:
        """No faults any more; what was held passes."""
        with self._lock:
            self._rules.clear()
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.open()

    def cut(self) -> None:
        """End all connections; clients may connect again."""
        with self._lock:
            streams, self._streams = self._streams, []
        for stream in streams:
            stream.close()

    def close(self) -> None:
        self.heal()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        with self._lock:
            threads = [*self._threads]
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _accept(self) -> None:
        while True:
            try:
                accepted = self._listener.accept()[0]
            except OSError:
                return
            try:
                beyond = socket.create_connection(self._target, PATIENCE)
                beyond.settimeout(None)
            except OSError:
                accepted.close()  # as if nobody listened
                continue
            client, server = Stream(accepted), Stream(beyond)
            with self._lock:
                self._streams += [client, server]
            for source, sink, reply in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pump, args=(source, sink, reply), daemon=True)
                with self._lock:
                    self._threads.add(thread)
                thread.start()

    def _pump(self, source: Stream, sink: Stream, reply: bool) -> None:
        with suppress(OSError, EOFError, ValueError):  # ValueError: closed meanwhile
            for part in source.greeting():
                sink.send(part)
            while True:
                message = source.receive()
                for delivered in [message] if isinstance(message, bytes) else self._changed(message, reply):
                    sink.send(delivered)
        source.close()
        sink.close()
        with self._lock:  # what has ended is not kept: a proxy may run for hours
            self._threads.discard(threading.current_thread())
            self._streams = [stream for stream in self._streams if stream not in (source, sink)]

    def _changed(self, message: Message, reply: bool) -> list[Message] | list[bytes]:
        operation = self._names.get(msgspec.msgpack.decode(message[1]), "unknown")
        with self._lock:
            rule = next((r for r in self._rules if r.reply == reply and r.operation in (operation, "*")), None)
            if rule is not None:
                rule.times -= 1
                if not rule.times:
                    self._rules.remove(rule)
        return [message] if rule is None else rule.fault(message)


def drop(_message: Message) -> list[Message]:
    """Nothing arrives."""
    return []


def double(message: Message) -> list[Message]:
    """It arrives twice."""
    return [message, message]


def swapped() -> Fault:
    """The first message arrives after the second; for an even number of them."""
    kept: list[Message] = []

    def fault(message: Message) -> list[Message]:
        if not kept:
            kept.append(message)
            return []
        return [message, kept.pop()]

    return fault


def answered(*frames: bytes) -> Fault:
    """Other frames arrive in place of a reply's result."""
    return lambda message: [[*message[:2], *frames]]


def truncated(message: Message) -> list[Message]:
    """The last frame lost its second half."""
    return [[*message[:-1], message[-1][: len(message[-1]) // 2]]]


def flipped(message: Message) -> list[Message]:
    """Every bit of the last frame is another."""
    return [[*message[:-1], bytes(byte ^ 0xFF for byte in message[-1])]]
