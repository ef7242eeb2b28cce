"""The load: clients whose threads store, look up, read and delete, and compare each tensor with what it must be."""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvdata import Connection, KVCacheContext, KVLayout
from kvdata.client.selection import Selection
from tests.faults.checks import CHUNK, check_named
from tests.faults.proxy import PATIENCE
from tests.faults.soak.records import Journal

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64)  # 64 KiB a chunk
POOL_MB = 12  # 192 chunks, of which a server keeps four fifths
DOCUMENTS, CHUNKS, SALTS = 30, 4, ("", "b")  # 240 chunks
THREADS = 2  # of a client
# How often each is drawn, and what an error calls it where that is another name.
KINDS = {"store": 4, "lookup": 2, "retrieve": 4, "many": 2, "part": 2, "lease": 2, "delete": 1, "reconnect": 0.5}
CALLS = {"many": "retrieve", "part": "retrieve", "reconnect": "connect"}

RUN, PARK, STOP = range(3)  # commands
PARKED = 1

Judged = Callable[[], str]  # compares what a call returned; not part of the time that the call took


@dataclass(frozen=True)
class Plan:
    """What a client is told.

    Attributes:
        connection: where the server is.
        seed: of what it draws.
        folder: for its journals and its log.
    """

    connection: Connection
    seed: int
    folder: Path


@functools.cache
def content(document: int, salt: str) -> tuple[list[int], torch.Tensor]:
    """Tokens and cache ``[2, L, T, D]`` of a whole document: any process can compute both."""
    tokens = list(range(1000 * document, 1000 * document + CHUNKS * CHUNK))
    generator = torch.Generator().manual_seed(tokens[0] + len(salt))
    return tokens, torch.randn(2, LAYOUT.num_layers, len(tokens), LAYOUT.hidden, generator=generator).to(LAYOUT.dtype)


def compared(found: torch.Tensor | None, wanted: torch.Tensor) -> str:
    """Whether what was found is what was wanted ``[2, L, T, D]``, or the beginning of it, bit for bit."""
    if found is None:
        return "miss"
    if not torch.equal(found, wanted[:, :, : found.shape[2]]):
        return "wrong"
    return "ok" if found.shape[2] == wanted.shape[2] else "partial"


def together(outcomes: list[str]) -> str:
    """Of several prompts."""
    if "wrong" in outcomes:
        return "wrong"
    return outcomes[0] if len({*outcomes}) == 1 else "partial"


class Client:
    """What the threads of one client share."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name = plan, name
        self.context = KVCacheContext(plan.connection)
        self._lock, self._users = threading.Lock(), 0

    def enter(self) -> None:
        with self._lock:
            if not self._users:
                self.context = KVCacheContext(self.plan.connection)
            self._users += 1

    def leave(self) -> None:
        """The last one closes the door."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self.context.close()


class Worker:
    """One thread of a client: with a context of its own, and the one that it shares with the others.

    Args:
        client: whose.
        thread: its number there.
        control: the command, for everybody.
        states: each thread's own place, where it says that it is `PARKED`.
        place: its place there.
    """

    def __init__(self, client: Client, thread: int, control: MutableSequence[int], place: int) -> None:
        self.client, self.plan = client, client.plan
        self._control, self._place = control, place
        self._random = random.Random(f"{self.plan.seed} {client.name} {thread}")
        self._journal = Journal(self.plan.folder / f"{client.name}.{thread}.jsonl")
        self._own = KVCacheContext(self.plan.connection)

    def run(self) -> None:
        kinds, weights = [*KINDS], [*KINDS.values()]
        self.client.enter()
        while self._control[0] == RUN or self._waited():
            self._one(self._random.choices(kinds, weights)[0])
            time.sleep(0.02 * self._random.random())
        self._journal.close()

    def _waited(self) -> bool:
        """Close everything, wait, and go on; False at the end."""
        self._own.close()
        self.client.leave()
        self._control[self._place] = PARKED
        while self._control[0] == PARK:
            time.sleep(0.02)
        if self._control[0] == STOP:
            return False
        self._control[self._place] = 0
        self._own = KVCacheContext(self.plan.connection)
        self.client.enter()
        return True

    def _one(self, kind: str) -> None:
        self._journal.begins(kind)
        try:
            judged: Judged = getattr(self, kind)()
        except Exception as error:
            self._journal.ended(time.monotonic(), type(error).__name__, str(error), self._complaint(error, kind))
            time.sleep(0.1)  # as whoever tries again does
        else:
            self._journal.ended(time.monotonic(), judged())

    def _complaint(self, error: Exception, kind: str) -> str:
        connection = self.plan.connection
        try:
            check_named(error, CALLS.get(kind, kind), (connection.url, connection.http_url))
        except AssertionError as exc:
            return str(exc)
        return ""

    def _drawn(self) -> tuple[KVCacheContext, list[int], torch.Tensor, str]:
        """A context, and the beginning of a document: its tokens, cache and salt."""
        salt = self._random.choice(SALTS)
        tokens, kv = content(self._random.randrange(DOCUMENTS), salt)
        length = CHUNK * self._random.randint(1, CHUNKS)
        ctx = self._random.choice([self._own, self.client.context])
        return ctx, tokens[:length], kv[:, :, :length], salt

    def store(self) -> Judged:
        ctx, tokens, kv, salt = self._drawn()
        new = ctx.store(kv, tokens, salt)
        return lambda: "ok" if new else "dedup"

    def lookup(self) -> Judged:
        ctx, tokens, _, salt = self._drawn()
        hit = ctx.lookup(tokens, salt)
        return lambda: "ok" if hit == len(tokens) else "partial" if hit else "miss"

    def retrieve(self) -> Judged:
        ctx, tokens, kv, salt = self._drawn()
        found = ctx.retrieve(tokens, salt)
        return lambda: compared(found, kv)

    def many(self) -> Judged:
        ctx = self._random.choice([self._own, self.client.context])
        _, prompts, caches, salts = zip(*(self._drawn() for _ in range(4)), strict=True)
        found = ctx.retrieve_many(prompts, salts)
        return lambda: together([compared(*pair) for pair in zip(found, caches, strict=True)])

    def part(self) -> Judged:
        """The second layer, the first head, half a chunk and a bit of the next; V alone."""
        ctx, tokens, kv, salt = self._drawn()
        first, last = CHUNK // 2, CHUNK + 7
        selection = Selection([1], [0], slice(first, last), ("v",))
        (found,) = ctx.retrieve_many([tokens], salt, selection)
        return lambda: compared(found, kv[1:, 1:2, first:last, : LAYOUT.head_dim])

    def lease(self) -> Judged:
        ctx, tokens, kv, salt = self._drawn()
        with ctx.lease(tokens, salt) as views:
            time.sleep(self._random.choice([0.0, 0.2]))
            found = torch.cat([view.flatten(3) for view in views], dim=2) if views else None
        return lambda: compared(found, kv)

    def delete(self) -> Judged:
        ctx, tokens, _, salt = self._drawn()
        deleted = ctx.delete(tokens, salt)
        return lambda: "ok" if deleted else "miss"

    def reconnect(self) -> Judged:
        self._own.close()
        self._own = KVCacheContext(self.plan.connection)
        self._own.open()
        return lambda: "ok"


def start_client(plan: Plan, name: str, control: MutableSequence[int], place: int) -> list[threading.Thread]:
    """The threads of one client; ``place`` is the first one's."""
    for document in range(DOCUMENTS):
        for salt in SALTS:
            content(document, salt)
    client = Client(plan, name)
    workers = [Worker(client, number, control, place + number) for number in range(THREADS)]
    threads = [threading.Thread(target=worker.run, name=name) for worker in workers]
    for thread in threads:
        thread.start()
    return threads


def client_process(plan: Plan, name: str, control: MutableSequence[int], place: int) -> None:
    """A client in a process of its own."""
    torch.set_num_threads(1)
    log_to(plan.folder / f"{name}.log")
    for thread in start_client(plan, name, control, place):
        thread.join()


def log_to(path: Path) -> None:
    """kvdata's warnings go there."""
    logger = logging.getLogger("kvdata")
    logger.addHandler(logging.FileHandler(path))
    logger.propagate = False


def until_parked(control: MutableSequence[int]) -> None:
    """Wait until all threads are."""
    deadline = time.monotonic() + 2 * PATIENCE
    while not all(state == PARKED for state in control[1:]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"clients did not come to rest: {[*control]}")
        time.sleep(0.02)
