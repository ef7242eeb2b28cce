"""The embedded server: a ZMQ thread and an HTTP thread around one `Service`."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import uvicorn
import zmq

from kvdata.errors import InvalidRequest, ServerError
from kvdata.server.dispatch import FRAME_BYTES, SEND_QUEUE, Dispatcher
from kvdata.server.pool import ALIGNMENT, Pool
from kvdata.server.service import GRACE_SECONDS, REAP_SECONDS, Service
from kvdata.server.store import ChunkStore
from kvdata.server.web import build_app
from kvdata.wire.shm import create_pool

STOP_SECONDS = 5.0
# A signal may reach any thread, above all after SIGCONT; a main thread that waits is not woken by it.
_NOTICE_SECONDS = 0.2


@dataclass(eq=False)
class EmbeddedServer:
    """An LMCache-compatible server in this process; use it as a context manager, or `start` and `stop`.

    Args:
        port, http_port: TCP ports; 0 takes free ones.
        host: address to listen on. The protocol knows no authentication: keep it local.
        chunk_size: tokens per chunk.
        pool_bytes: memory for chunks; pages are taken as they are written.
        shm_name: shared-memory name; None takes a free one, "" means pickle transfer.
        transfer: "shm" or "pickle".
        watermark, eviction_ratio: once this fraction of the pool is taken, this fraction of the chunks goes.
        write_ttl, read_ttl, session_ttl: seconds until reservations, read locks and sessions expire.
        reap_seconds, grace_seconds: silence after which a registration is dropped, of a client that once pinged and of
            any other.
        clock: what these are measured with; seconds.

    Once started it has ``url``, ``http_url`` and, as ``shm_name``, the whole name of the segment (or "").
    """

    port: int = 0
    http_port: int = 0
    host: str = "127.0.0.1"
    chunk_size: int = 256
    pool_bytes: int = 1 << 30
    shm_name: str | None = None
    transfer: str = "shm"
    watermark: float = 0.8
    eviction_ratio: float = 0.2
    write_ttl: float = 600.0
    read_ttl: float = 300.0
    session_ttl: float = 600.0
    reap_seconds: float = REAP_SECONDS
    grace_seconds: float = GRACE_SECONDS
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def __post_init__(self) -> None:
        self.url = self.http_url = ""
        self._running: ExitStack | None = None
        if self.transfer not in ("shm", "pickle") or self.chunk_size < 1 or self.pool_bytes < ALIGNMENT:
            raise InvalidRequest("transfer must be 'shm' or 'pickle', chunk_size >= 1, pool_bytes >= 4096")

    def __enter__(self) -> EmbeddedServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> EmbeddedServer:
        """Start serving; `ServerError` when a port or name is in use, or shared memory lacks the room."""
        if self._running is None:
            with ExitStack() as stack:
                service = self._open_service(stack)
                zmq_thread = self._serve_zmq(service, stack)
                self._serve_http(service, zmq_thread.is_alive, stack)
                self._running, self._pid = stack.pop_all(), os.getpid()
            atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """End both threads, close the sockets, remove the shared memory. In a forked child: nothing."""
        if self._running is not None and self._pid == os.getpid():
            running, self._running = self._running, None
            atexit.unregister(self.stop)
            running.close()

    def run_forever(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT. In the main thread only; ``on_ready`` runs once started."""
        done = threading.Event()
        previous = {n: signal.signal(n, lambda *_: done.set()) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            with self:
                on_ready()
                while not done.wait(_NOTICE_SECONDS):
                    pass
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _open_service(self, stack: ExitStack) -> Service:
        size = self.pool_bytes - self.pool_bytes % ALIGNMENT
        if self.transfer == "pickle" or self.shm_name == "":
            self.shm_name, memory = "", torch.empty(size, dtype=torch.uint8)
        else:
            segment = create_pool(self.shm_name, size)
            stack.callback(segment.close)
            self.shm_name, memory = segment.path.name, segment.view(0, size, torch.uint8)
        pool = Pool(memory)
        stack.callback(pool.close)
        ttls = (self.write_ttl, self.read_ttl)
        store = ChunkStore(pool, self.clock, *ttls, self.watermark, self.eviction_ratio)
        lives = (self.session_ttl, self.reap_seconds, self.grace_seconds)
        return Service(store, self.chunk_size, self.shm_name, *lives)

    def _serve_zmq(self, service: Service, stack: ExitStack) -> threading.Thread:
        context = stack.enter_context(zmq.Context())
        router = context.socket(zmq.ROUTER)
        stack.callback(router.close, 0)
        router.set(zmq.SNDHWM, SEND_QUEUE)
        router.set(zmq.MAXMSGSIZE, FRAME_BYTES)
        try:
            router.bind(f"tcp://{self.host}:{self.port or '*'}")
        except zmq.ZMQError as exc:
            raise ServerError(f"cannot listen on {self.host}:{self.port}: {exc}; take another port") from exc
        self.url = router.get_string(zmq.LAST_ENDPOINT)
        self.port = int(self.url.rpartition(":")[2])
        stopping = threading.Event()
        thread = threading.Thread(target=Dispatcher(service).run, args=(router, stopping), daemon=True)
        thread.start()
        stack.callback(thread.join, STOP_SECONDS)
        stack.callback(stopping.set)
        return thread

    def _serve_http(self, service: Service, is_alive: Callable[[], bool], stack: ExitStack) -> None:
        try:
            listener = stack.enter_context(socket.create_server((self.host, self.http_port)))
        except OSError as exc:
            where = f"{self.host}:{self.http_port}"
            raise ServerError(f"cannot listen on {where}: {exc}; take another http_port") from exc
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; else 40 ms per answer
        self.http_port = listener.getsockname()[1]
        self.http_url = f"http://{self.host}:{self.http_port}"
        app = build_app(service, self._config(), is_alive)
        config = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        stack.callback(thread.join, STOP_SECONDS)
        stack.callback(setattr, server, "should_exit", True)
        while not server.started and thread.is_alive():  # stopped before that, it would leave its sockets open
            time.sleep(0.002)

    def _config(self) -> dict[str, Any]:
        """What ``GET /config`` answers."""
        mp = {
            "transport": "zmq",
            "chunk_size": self.chunk_size,
            "max_workers": 1,
            "hash_algorithm": "blake3",
            "separate_object_groups": False,
            "supported_transfer_mode": "engine_driven",
            "shm_name": self.shm_name,
            "instance_id": str(uuid.uuid4()),
            "worker_reap_timeout_seconds": self.reap_seconds,
            "worker_registration_grace_seconds": self.grace_seconds,
            "session_ttl_seconds": self.session_ttl,
        }
        l1 = {"write_ttl_seconds": self.write_ttl, "read_ttl_seconds": self.read_ttl}
        return {"mp": mp, "storage_manager": {"l1_manager_config": l1}}
