"""A proxy in front of a server's HTTP port that answers some paths itself, in whatever way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

# Gets the handler of a request, and writes what it likes to its ``wfile``: status line and all.
Answer = Callable[[BaseHTTPRequestHandler], None]


class WebProxy:
    """Forwards everything, except where `answer` says otherwise; `url` is what a client is given."""

    def __init__(self, target: str) -> None:
        self._answers: dict[str, Answer] = {}
        self.closing = threading.Event()
        answers, closing = self._answers, self.closing

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                answer = answers.get(self.path) or answers.get("*")
                if answer is not None:
                    self.close_connection = True
                    answer(self)
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                beyond = HTTPConnection(urlsplit(target).netloc, timeout=20)
                try:
                    beyond.request(self.command, self.path, body, {"Content-Type": "application/json"})
                    found = beyond.getresponse()
                    content = found.read()
                except (OSError, HTTPException):  # as if nobody listened: the connection just ends
                    self.close_connection = True
                    return
                finally:
                    beyond.close()
                self.send_response(found.status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

            @property
            def closing(self) -> threading.Event:
                return closing

        class Http(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:  # a client that hung up
                pass

        self._server = Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def answer(self, path: str, answer: Answer) -> None:
        """Answer a path (``"*"``: any) so from now on."""
        self._answers[path] = answer

    def heal(self) -> None:
        """Forward everything again."""
        self._answers.clear()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def said(body: bytes, status: int = 200, kind: str = "application/json") -> Answer:
    """A well-formed answer with this body."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Connection", "close")
        request.end_headers()
        request.wfile.write(body)

    return answer


def raw(data: bytes) -> Answer:
    """These bytes, and the connection ends."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(data)

    return answer


def endless(piece: bytes, seconds: float) -> Answer:
    """An answer that never ends: one piece after the other, so long apart."""

    def answer(request: Any) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        while not request.closing.wait(seconds):
            request.wfile.write(piece)

    return answer
