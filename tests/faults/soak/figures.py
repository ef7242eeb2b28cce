"""What a process, and a server, hold."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.faults.checks import wait_clean
from tests.servers import Server

MEMORY = "MiB of memory"  # RssAnon: without the server's pool, which is shared


def of_process(pid: int) -> dict[str, float]:
    """Of a process of this user."""
    proc = Path(f"/proc/{pid}")
    kilobytes = re.search(r"RssAnon:\s+(\d+)", (proc / "status").read_text())
    assert kilobytes is not None
    links = [*map(_link, (proc / "fd").iterdir())]
    return {
        MEMORY: int(kilobytes[1]) / 1024,
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "threads": len(os.listdir(proc / "task")),
        "mapped pools": (proc / "maps").read_text().count("lmcache_l1_pool_"),
    }


def _link(path: Path) -> str:
    with suppress(FileNotFoundError):  # closed just now
        return os.readlink(path)
    return ""


def sockets(pid: int) -> list[str]:
    """A process's sockets, for people: kind, state, and the two ends, as far as they have any."""
    return sorted(
        f"{one.type.name} {one.status} {_end(one.laddr)} {_end(one.raddr)}".strip()
        for one in psutil.Process(pid).net_connections("all")
    )


def _end(address: Any) -> str:
    return ":".join(map(str, address)) if isinstance(address, tuple) else str(address)


def of_server(server: Server, seconds: float) -> dict[str, float]:
    """Of a server, and what its clients have left on it after its time-outs have passed, so many seconds at most."""
    with suppress(AssertionError):  # the figures say so
        wait_clean(server, seconds)
    status = server.status()
    memory = status["storage_manager"]["l1_manager"]
    return {
        **of_process(server.pid),
        "read locks": memory["read_locked_count"],
        "reservations": memory["write_locked_count"] + memory.get("staging_object_count", 0),
        "sessions": status["active_sessions"],
        "registrations": len(status["non_cuda_context_meta"]),
    }


def settled(take: Callable[[], dict[str, float]], limit: dict[str, float] | None = None) -> dict[str, float]:
    """Figures once they are not above the limit's, or without one have stopped to change; 15 s at most."""
    end = time.monotonic() + 15.0
    before: dict[str, float] = {}
    while True:
        now = take()
        counts = {name: figure for name, figure in now.items() if name != MEMORY}
        good = counts == before if limit is None else all(counts[name] <= limit[name] for name in counts)
        if good or time.monotonic() > end:
            return now
        before = counts
        time.sleep(0.3)
