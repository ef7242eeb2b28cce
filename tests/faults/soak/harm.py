"""The faults of a soak: what each does, for how long, and which errors it may bring its clients."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch

from kvdata import Connection
from kvdata.errors import LeaseLost, StoreFailed
from tests.faults.checks import CHUNK, MODEL, Place
from tests.faults.proxy import Fault, answered, double, drop, flipped, truncated
from tests.faults.soak.load import LAYOUT
from tests.faults.test_held import clear
from tests.faults.web import Answer, endless, raw, said
from tests.faults.zmtp import Message

REPLIES = [
    "lookup",
    "query_prefetch_status",
    "prepare_retrieve",
    "commit_retrieve",
    "end_session",
    "prepare_store",
    "commit_store",
    "free_lookup_locks",
    "get_chunk_size",
    "register",
]
PAGES: list[Answer] = [
    said(b"<html><body>It works!</body></html>", kind="text/html"),
    said(b"Internal Server Error", 500, "text/plain"),
    said(b"null"),
    said(b"[1, 2, 3]"),
    said(b" " * (20 << 20)),
    raw(b""),
    raw(b"220 mail.example.org ESMTP\r\n"),
    raw(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"mp": '),
    endless(b" ", 0.1),
]


@dataclass
class Stage:
    """What faults are done to.

    Attributes:
        place: the server and its proxies.
        random: what they draw from.
        seconds: how long one of them lasts, about.
        replace_client: kills a client's process with SIGKILL, and starts another.
        lock_seconds: for how long the server keeps a lock.
    """

    place: Place
    random: random.Random
    seconds: float
    replace_client: Callable[[], None]
    lock_seconds: float


@dataclass(frozen=True)
class Harm:
    """A fault.

    Attributes:
        name: for people.
        do: does it, and undoes it; returns how many messages, chunks or processes it struck.
        brings: the errors that it may bring.
        deadly: the server does not survive it.
    """

    name: str
    do: Callable[[Stage], int]
    brings: frozenset[str]
    deadly: bool = False


def _replies(fault: Fault) -> Callable[[Stage], int]:
    def do(stage: Stage) -> int:
        struck = 0

        def counted(message: Message) -> list[Message]:
            nonlocal struck
            struck += 1
            return fault(message)

        for operation in stage.random.sample(REPLIES, 4):
            stage.place.proxy.replies(operation, counted, times=stage.random.randint(1, 3))
        time.sleep(stage.seconds)
        stage.place.proxy.heal()
        return struck

    return do


def _late(message: Message) -> list[Message]:
    time.sleep(0.4)
    return [message]


def _cut(stage: Stage) -> int:
    for _ in range(3):
        stage.place.proxy.cut()
        time.sleep(stage.seconds / 3)
    return 3


def _nonsense(stage: Stage) -> int:
    pages = stage.random.sample(PAGES, 2)
    for page in pages:
        stage.place.web.answer("*", page)
        time.sleep(stage.seconds / 2)
    stage.place.web.heal()
    return len(pages)


def _freeze(stage: Stage) -> int:
    stage.place.server.freeze()
    time.sleep(1.0)
    stage.place.server.thaw()
    return 1


def _kill(stage: Stage) -> int:
    stage.place.server.kill()
    time.sleep(stage.seconds * stage.random.random())
    stage.place.server.start()
    return 1


def _clear(stage: Stage) -> int:
    for _ in range(2):
        clear(stage.place, False)
        time.sleep(stage.seconds / 2)
    return 2


def _kill_client(stage: Stage) -> int:
    time.sleep(stage.seconds * stage.random.random())
    stage.replace_client()
    return 1


def _fill(stage: Stage) -> int:
    """Somebody stores and reads as much as there is room for, and keeps it locked for a while."""
    server, mine = stage.place.server, list[list[int]]()
    kv = torch.zeros(2, LAYOUT.num_layers, 16 * CHUNK, LAYOUT.hidden, dtype=LAYOUT.dtype)
    end = time.monotonic() + min(4 * stage.seconds, stage.lock_seconds / 2)
    with Connection(server.url, server.http_url, MODEL, 4.0, LAYOUT).connect() as ctx, ExitStack() as locked:
        while time.monotonic() < end:
            first = 1_000_000 + 1000 * stage.random.randrange(1_000_000)
            mine.append(list(range(first, first + 16 * CHUNK)))
            try:
                ctx.store(kv, mine[-1], "full")
            except StoreFailed:
                mine.pop()
                break
            locked.enter_context(suppress(LeaseLost))  # on a busy machine it takes longer than the locks live
            locked.enter_context(ctx.lease(mine[-1], "full"))
        time.sleep(stage.seconds)
        locked.close()
        for tokens in mine:
            ctx.delete(tokens, "full")
    return 16 * len(mine)


_SLOW = ["ServerTimeout", "LeaseLost", "UnsupportedServer"]  # the last: of a registration that is not answered
_GONE = ["ConnectionLost", "ServerUnreachable", *_SLOW]
_DAMAGED = ["ProtocolError", *_SLOW]

HARMS = [
    Harm("late replies", _replies(_late), frozenset(_SLOW)),
    Harm("lost replies", _replies(drop), frozenset(_SLOW)),
    Harm("doubled replies", _replies(double), frozenset()),
    Harm("truncated replies", _replies(truncated), frozenset(_DAMAGED)),
    Harm("corrupted replies", _replies(flipped), frozenset(_DAMAGED)),
    Harm("replies of another type", _replies(answered(b"\xa1x")), frozenset(_DAMAGED)),
    Harm("connections cut", _cut, frozenset(_GONE)),
    Harm("HTTP nonsense", _nonsense, frozenset(["ProtocolError", *_GONE])),
    Harm("server stopped (SIGSTOP)", _freeze, frozenset(_GONE)),
    Harm("server killed and restarted", _kill, frozenset(_GONE), deadly=True),
    Harm("cache cleared", _clear, frozenset()),
    Harm("pool full of locked chunks", _fill, frozenset()),
    Harm("client killed (SIGKILL)", _kill_client, frozenset()),
]
# What clients bring upon each other, without any fault: a full pool, the same chunks written, read or deleted at once.
ALWAYS = frozenset(["PoolFull", "StoreConflict", "StoreFailed", "CacheLocked"])
