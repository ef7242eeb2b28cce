"""The embedded server with a stream of KV events in front of it, as LMCache 0.5.6 sends them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import msgspec
import zmq

from kvdata.server import EmbeddedServer
from kvdata.wire.keys import chunk_hashes
from kvdata.wire.messages import ACK, CANCEL, NEWEST, SUBSCRIBE, KVEvent, KVEventBatch, operation_numbers

PING = msgspec.msgpack.encode(operation_numbers(NEWEST)["ping"])
SUBSCRIBES = msgspec.msgpack.encode(SUBSCRIBE)


@dataclass
class Stream:
    cursor: int
    first: bool = True
    credit: bool = True


class EventServer:
    """Answers subscriptions and pings itself and passes everything else on to an embedded server.

    Args:
        embedded: holds the chunks.
        http: changes an answer ``(path, JSON)`` of the embedded server's HTTP side.
    """

    def __init__(self, embedded: EmbeddedServer, http: Callable[[str, Any], Any] | None = None) -> None:
        self.incarnation = 1
        self.log: list[KVEvent] = []
        self.lost_before = 0  # events up to this number are no longer in the log
        self.answers_pings = self.answers_subscriptions = True
        self.cursors: list[int] = []  # of all subscriptions
        self.pings = self.cancels = 0
        self.reap_seconds = 120.0
        self.http = http or (lambda _path, answer: answer)
        self.chunk_size = embedded.chunk_size
        self._upstream_url = embedded.url
        self._upstream_http = httpx.Client(base_url=embedded.http_url, timeout=10, trust_env=False)
        self._held: list[list[bytes]] = []
        self._streams: dict[tuple[bytes, bytes], Stream] = {}
        self._changed = threading.Condition()
        self._stop, self._restarting, self._ending = threading.Event(), threading.Event(), threading.Event()
        self._zmq = zmq.Context()
        self._router = self._zmq.socket(zmq.ROUTER)
        self.url = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._web = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http_url = f"http://127.0.0.1:{self._web.server_address[1]}"
        self._threads = [
            threading.Thread(target=self._run),
            threading.Thread(target=self._web.serve_forever, args=[0.02]),
        ]
        for thread in self._threads:
            thread.start()

    # -- what a test does to it -----------------------------------------------------------------------

    def store(self, tokens: list[int], first: int = 0, model: str = "unit/model") -> None:
        """Report the whole chunks of ``tokens`` from ``first`` on as stored."""
        hashes, size = chunk_hashes(tokens, self.chunk_size), self.chunk_size
        parents = [None, *hashes]
        with self._changed:
            for i in range(first, len(hashes)):
                part = tokens[i * size : (i + 1) * size]
                self.log.append(KVEvent(len(self.log) + 1, "stored", model, [hashes[i]], parents[i], part))

    def end_streams(self) -> None:
        """As with subscribers that were silent for too long."""
        self._ending.set()
        self.until(lambda: not self._ending.is_set())

    def restart(self) -> None:
        """Come back on the same port with an empty log."""
        self._restarting.set()
        self.until(lambda: not self._restarting.is_set())

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the server will have seen."""
        with self._changed:
            assert self._changed.wait_for(condition, 30)

    def stop(self) -> None:
        self._stop.set()
        self._web.shutdown()
        for thread in self._threads:
            thread.join(10)
        self._web.server_close()
        self._upstream_http.close()

    # -- ZMQ --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        upstream = self._zmq.socket(zmq.DEALER)
        upstream.connect(self._upstream_url)
        while not self._stop.is_set():
            with self._changed:
                if self._restarting.is_set():
                    self._start_anew()
                if self._ending.is_set():
                    self._end_streams()
                while self._router.poll(0):
                    self._request(self._router.recv_multipart(), upstream)
                while upstream.poll(0):
                    uid, *rest = upstream.recv_multipart()
                    self._router.send_multipart([uid[:5], uid[5:], *rest])
                while self._held and self.answers_pings:
                    self._router.send_multipart(self._held.pop(0))
                for key, stream in self._streams.items():
                    self._feed(key, stream)
                self._changed.notify_all()
            self._router.poll(5)
        self._zmq.destroy(linger=0)

    def _start_anew(self) -> None:
        self._router.close(0)
        self._router = self._zmq.socket(zmq.ROUTER)
        while True:
            try:
                self._router.bind(self.url)
                break
            except zmq.ZMQError:  # the old socket is closed a moment later
                self._stop.wait(0.01)
        self.incarnation += 1
        self.log, self.lost_before = [], 0
        self._streams.clear()
        self._restarting.clear()

    def _end_streams(self) -> None:
        for client, uid in self._streams:
            self._router.send_multipart([client, uid, SUBSCRIBES])
        self._streams.clear()
        self._ending.clear()

    def _request(self, frames: list[bytes], upstream: zmq.Socket[bytes]) -> None:
        client, uid, operation, *rest = frames
        key = (client, uid)
        if operation == b"":
            if rest == [ACK] and key in self._streams:
                self._streams[key].credit = True
            elif rest == [CANCEL]:
                self.cancels += 1
                self._streams.pop(key, None)
        elif operation == SUBSCRIBES:
            _instance, _model, cursor, most = map(msgspec.msgpack.decode, rest)
            assert 1 <= most <= 1024
            self.cursors.append(cursor)
            if self.answers_subscriptions:
                self._streams[key] = Stream(cursor)
        elif operation == PING:
            self.pings += 1
            self._held.append([client, uid, operation, msgspec.msgpack.encode(True)])
        else:
            upstream.send_multipart([client + uid, operation, *rest])  # a server gives back any uid as it was

    def _feed(self, key: tuple[bytes, bytes], stream: Stream) -> None:
        last = len(self.log)
        lost = stream.cursor > last or stream.cursor < self.lost_before
        events = [e for e in self.log[max(stream.cursor, self.lost_before) : last] if e.model_name == "unit/model"]
        if stream.credit and (stream.first or lost or events):
            batch = KVEventBatch(True, self.incarnation, last, lost, events)
            self._router.send_multipart([*key, SUBSCRIBES, msgspec.msgpack.encode(batch)])
            stream.cursor, stream.first, stream.credit = last, False, False

    # -- HTTP -------------------------------------------------------------------------------------------

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = server._upstream_http.get(self.path).json()
                if self.path == "/status":
                    answer["kv_events"] = {"enabled": True, "incarnation": server.incarnation}
                elif self.path == "/config":
                    answer["mp"]["worker_reap_timeout_seconds"] = server.reap_seconds
                body = json.dumps(server.http(self.path, answer)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
