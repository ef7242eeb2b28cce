"""The processes beside a server: the stand-in of an engine, and LMCache's SDK at work."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvdata import KVLayout
from tests.live.stack import LOGS
from tests.servers import Server

HERE = Path(__file__).parent
READY_SECONDS, ANSWER_SECONDS = 120.0, 300.0


class Upstream:
    """The process of `benchmarks.upstream`: each call does one piece of work there and returns its seconds."""

    def __init__(self, python: Path, server: Server) -> None:
        self._place = {"url": server.url, "http_url": server.http_url}
        self._log = open(LOGS / "bench-upstream.log", "wb")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [str(python), str(HERE / "upstream.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )

    def __call__(self, operation: str, model: str, **job: Any) -> float:
        """`RuntimeError` says what went wrong there."""
        return self._ask({"operation": operation, **self._place, "model": model, **job})

    def release(self) -> None:
        """End the DataLoader workers that it keeps."""
        self._ask({"operation": "release"})

    def close(self) -> None:
        """End it, and wait for it."""
        assert self._process.stdin
        self._process.stdin.close()
        end(self._process)
        self._log.close()

    def _ask(self, job: dict[str, Any]) -> float:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(next_line(self._process, ANSWER_SECONDS))
        if "error" in answer:
            raise RuntimeError(f"LMCache's SDK: {answer['error']}; see {self._log.name}")
        return float(answer["seconds"])


@contextmanager
def engine(python: Path, server: Server, models: dict[str, KVLayout]) -> Iterator[None]:
    """`benchmarks.engine`, registered for these models."""
    names = [f"{name}:{m.num_layers}:{m.num_kv_heads}:{m.head_dim}" for name, m in models.items()]
    with open(LOGS / "bench-engine.log", "wb") as log:
        process = subprocess.Popen(
            [str(python), str(HERE / "engine.py"), server.url, *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            next_line(process, READY_SECONDS)
            yield
        finally:
            assert process.stdin
            process.stdin.close()
            end(process)


def next_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next line of a process's output; `RuntimeError` when it ends before, or is late."""
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    line = process.stdout.readline() if ready else b""
    if not line:
        state = f"ended ({process.wait(10)})" if ready else f"said nothing for {seconds:g} s"
        raise RuntimeError(f"process {process.pid} {state}; see the logs bench-*.log in {LOGS}")
    return line


def end(process: subprocess.Popen[bytes], seconds: float = 20.0) -> None:
    """Wait for a process that was asked to end; kill it when it does not."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"killing process {process.pid}, which does not end", file=sys.stderr)
        process.kill()
        process.wait(seconds)
    finally:
        if process.stdout:
            process.stdout.close()
