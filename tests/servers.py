"""Servers under test as processes: the embedded one, and a real LMCache server where one is installed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from kvdata.server.web import VERSION
from kvdata.wire.messages import parse_release
from tests.template import Forked, stands_still, template

READY_SECONDS = 60.0


def free_port() -> int:
    """A port that nobody listens on, below the range from which the kernel takes ports for outgoing connections.

    From within that range another test's connection could take it before the server binds it, or while it restarts.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, max(lowest, 11_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def answers(url: str) -> bool:
    """Whether a process is up far enough to say so at `url`."""
    try:
        return httpx.get(url, timeout=1, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


class Server:
    """A server process on fixed ports, so that it can be killed and started again under the same URLs.

    Args:
        kind: ``embedded``, or the path of an ``lmcache`` command.
        transfer: ``shm`` or ``pickle``.
        flags: more of the command's own options.
        log: where its output goes; by default a temporary file that `stop` removes.
        environment: variables of a real server's process, besides this one's.
    """

    def __init__(
        self,
        kind: str,
        transfer: str,
        chunk_size: int = 64,
        pool_mb: int = 64,
        flags: Sequence[str] = (),
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.transfer, self.chunk_size, self.pool_mb = kind, transfer, chunk_size, pool_mb
        self.release = release_of(kind)
        port, http_port = free_port(), free_port()
        self.url, self.http_url = f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}"
        self.shm_name = f"kvdata-test-{os.getpid()}-{port}"
        self.pool = Path(f"/dev/shm/lmcache_l1_pool_{self.shm_name}")
        self.flags = tuple(flags)
        self.environment = dict(environment or {})
        self.log = log or Path(tempfile.gettempdir()) / f"{self.shm_name}.log"
        self._keep_log = log is not None
        self._ports = (str(port), str(http_port))
        self._process: subprocess.Popen[bytes] | Forked | None = None
        if kind == "embedded":
            template()  # now, so that a server that is started again costs no descriptors

    def start(self) -> Server:
        self._process = process = self._started()
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if not (process.running() if isinstance(process, Forked) else process.poll() is None):
                break
            if answers(self.http_url + "/healthcheck"):
                return self
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"{self.kind} did not come up:\n{self.log.read_text()[-2000:]}")

    def _started(self) -> subprocess.Popen[bytes] | Forked:
        if self.kind == "embedded":
            return template().start(self._command(), self.log)
        with open(self.log, "ab") as log:
            return subprocess.Popen(self._command(), stdout=log, stderr=log, env={**os.environ, **self.environment})

    def stop(self) -> None:
        """End it as a user would (SIGTERM), and check that it does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            finally:
                self.kill()
            # Older releases leave this to a helper process of theirs, which does it a moment later.
            deadline = time.monotonic() + 5
            while self.pool.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        if not self._keep_log:
            self.log.unlink(missing_ok=True)

    def kill(self) -> None:
        """SIGKILL: nothing is cleaned up."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(20)
            if isinstance(self._process, Forked):
                self._process.close()
            self._process = None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def freeze(self) -> None:
        """SIGSTOP, and wait until all of its threads have stopped."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + READY_SECONDS
        while not stands_still(self._process.pid):
            assert time.monotonic() < deadline, "it does not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(self.http_url + "/status", timeout=5, trust_env=False).json()
        return answer

    def memory(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status()["storage_manager"]["l1_manager"]
        return found

    def _command(self) -> list[str]:
        port, http_port = self._ports
        common = ["--port", port, "--http-port", http_port, "--chunk-size", str(self.chunk_size)]
        if self.kind == "embedded":
            serve = ["serve", "--pool-gb", str(self.pool_mb / 1024)]
            return [*serve, *common, "--shm-name", self.shm_name, "--transfer", self.transfer, *self.flags]
        lmcache = [self.kind, "server", "--host", "127.0.0.1", "--l1-size-gb", str(self.pool_mb / 1024)]
        lmcache += ["--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
        if self.release >= (0, 5, 5):  # before, there was nothing but ZMQ
            lmcache += ["--transport", "zmq"]
        if self.transfer == "shm":
            lmcache += ["--shm-name", self.shm_name, "--no-l1-use-lazy"]
        elif self.release < (0, 5, 4):  # these name a pool by themselves
            lmcache += ["--shm-name", ""]
        return [*lmcache, *common, *self.flags]


def release_of(kind: str) -> tuple[int, ...]:
    """``(0, 5, 6)`` for a server's kind: the embedded one's is the release it mimics."""
    return parse_release(VERSION) if kind == "embedded" else installed_release(kind)


def installed_release(command: str) -> tuple[int, ...]:
    """The same for the path of an ``lmcache`` command, from what is installed beside it."""
    environment = Path(shutil.which(command) or command).absolute().parent.parent
    found = environment.glob("lib/python*/site-packages/lmcache-*.dist-info")
    versions = [path.name.removesuffix(".dist-info").split("-")[1] for path in found]
    if len(versions) != 1:
        raise RuntimeError(f"{command} is not in an environment with LMCache installed")
    return tuple(int(part) for part in versions[0].split(".")[:3])
