"""ZMTP 3 on a byte stream, as far as a proxy needs it: messages in and out, everything else as it is."""

from __future__ import annotations

import socket
from collections.abc import Iterator

Message = list[bytes]

_GREETING = (10, 1, 53)  # each part waits for the other side's
_MORE, _LONG, _COMMAND = 1, 2, 4


class Stream:
    """One side of a connection. `EOFError` or `OSError` once it has ended."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as ZMQ does: small messages don't wait
        self._file = sock.makefile("rb")

    def greeting(self) -> Iterator[bytes]:
        """The 64 bytes with which each side begins, in parts."""
        return map(self._read, _GREETING)

    def receive(self) -> Message | bytes:
        """The next message, or a command as the bytes it came in."""
        frames: Message = []
        while True:
            head = self._read(1)
            size = self._read(8 if head[0] & _LONG else 1)
            body = self._read(int.from_bytes(size, "big"))
            if head[0] & _COMMAND:
                return head + size + body
            frames.append(body)
            if not head[0] & _MORE:
                return frames

    def send(self, message: Message | bytes) -> None:
        """A message, or bytes as they are."""
        self._socket.sendall(message if isinstance(message, bytes) else _encoded(message))

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it
        except OSError:
            pass
        self._file.close()
        self._socket.close()

    def _read(self, count: int) -> bytes:
        found = self._file.read(count)
        if len(found) < count:
            raise EOFError
        return found


def _encoded(message: Message) -> bytes:
    parts = []
    for number, frame in enumerate(message, 1):
        flags = _MORE if number < len(message) else 0
        if len(frame) > 255:
            parts.append(bytes([flags | _LONG]) + len(frame).to_bytes(8, "big") + frame)
        else:
            parts.append(bytes([flags, len(frame)]) + frame)
    return b"".join(parts)
