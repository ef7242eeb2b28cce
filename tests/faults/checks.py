"""What must hold whatever goes wrong: the checks that every test of a fault makes."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvdata import Connection, KVCacheContext, KVLayout
from kvdata.client.leftovers import CLEANUP_SECONDS
from kvdata.errors import KVCacheSDKError, StoreConflict
from tests.conformance.conftest import check_clean, fresh_tokens, random_kv
from tests.faults.proxy import PATIENCE, Proxy
from tests.faults.web import WebProxy
from tests.servers import Server

LAYOUT = KVLayout(num_layers=8, num_kv_heads=8, head_dim=64)  # 1 MiB a chunk of 64 tokens
MODEL = "tests/faults"
CHUNK = 64
TIMEOUT = 1.5  # of a client's calls
# Giving back may take two more waits, and this machine may be busy.
SLACK = 2 * CLEANUP_SECONDS + 3.0

_NEXT_STEP = re.compile(
    r"\b(start|run|see|check|retry|again|is it running|is the server running|give|use|wait|is this)\b", re.IGNORECASE
)


def checksum(kv: torch.Tensor) -> str:
    return hashlib.blake2b(kv.contiguous().view(torch.int16).numpy().tobytes(), digest_size=16).hexdigest()


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextmanager
def in_time(seconds: float = TIMEOUT) -> Iterator[None]:
    """A call with this time-out ends by then, whatever becomes of it."""
    started = time.monotonic()
    try:
        yield
    finally:
        taken = time.monotonic() - started
        assert taken < seconds + SLACK, f"a call with {seconds:g} s took {taken:.1f} s"


def check_named(error: BaseException, operation: str, urls: Iterable[str]) -> None:
    """A public error that says which operation it was, of which server, and what to do next."""
    said = str(error)
    assert isinstance(error, KVCacheSDKError), f"{type(error).__name__}: {said}"
    assert type(error).__module__ == "kvdata.errors", f"{type(error).__name__} is not public"
    assert operation in said, f"no {operation!r} in {said!r}"
    assert any(url in said for url in urls), f"no URL in {said!r}"
    assert _NEXT_STEP.search(said), f"no next step in {said!r}"


@dataclass
class Place:
    """A server behind two proxies, as a client sees it, and directly, as an observer does."""

    server: Server
    proxy: Proxy
    web: WebProxy
    opened: list[KVCacheContext] = field(default_factory=list)

    def connection(self, timeout: float = TIMEOUT) -> Connection:
        return Connection(self.proxy.url, self.web.url, MODEL, timeout, LAYOUT)

    def connect(self, timeout: float = TIMEOUT) -> KVCacheContext:
        """A context of a client; closed at the end of the test."""
        ctx = self.connection(PATIENCE).connect()
        ctx.connection = self.connection(timeout)
        self.opened.append(ctx)
        return ctx

    def observer(self) -> KVCacheContext:
        """Somebody else on the same server, whom no fault touches. The caller closes it."""
        return Connection(self.server.url, self.server.http_url, MODEL, 30.0, LAYOUT).connect()

    def heal(self) -> None:
        self.proxy.heal()
        self.web.heal()

    def names(self, error: BaseException, operation: str) -> None:
        """An error says which operation it was, of which server, and what to do next."""
        check_named(error, operation, (self.proxy.url, self.web.url))


class Corpus:
    """What was given to a server to keep, and what may come out of it: just that, or nothing."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.prompts: list[list[int]] = []
        self.caches: list[torch.Tensor] = []

    def fresh(self, chunks: int = 2) -> tuple[list[int], torch.Tensor]:
        """A prompt that nobody has stored, and a cache for it."""
        self.prompts.append(fresh_tokens(chunks * CHUNK))
        self.caches.append(random_kv(chunks * CHUNK, LAYOUT))
        return self.prompts[-1], self.caches[-1]

    def stored(self, ctx: KVCacheContext, chunks: int = 2) -> list[int]:
        tokens, kv = self.fresh(chunks)
        assert ctx.store(kv, tokens) is True
        return tokens

    def store_once_free(self, ctx: KVCacheContext, tokens: list[int], kv: torch.Tensor) -> None:
        """Store what is reserved still: it is free when the server's time-out has passed."""
        deadline = time.monotonic() + PATIENCE
        while ctx.lookup(tokens) < len(tokens):
            assert time.monotonic() < deadline, "still reserved"
            with suppress(StoreConflict):
                ctx.store(kv, tokens)

    def check(self, tokens: list[int], kv: torch.Tensor | None) -> bool:
        """Whether something was found; `AssertionError` when it is not exactly what was stored."""
        if kv is None:
            return False
        wanted = self.caches[self.prompts.index(tokens)][:, :, : kv.shape[2]]
        assert checksum(kv) == checksum(wanted), "a tensor that nobody stored under this prompt"
        return True

    def works_again(self, ctx: KVCacheContext) -> None:
        """After the fault the same context reads and writes, and others read what it wrote."""
        for tokens in self.prompts:
            self.check(tokens, ctx.retrieve(tokens))
        tokens = self.stored(ctx)
        assert self.check(tokens, ctx.retrieve(tokens))
        self.check_all_visible([tokens])

    def check_all_visible(self, readable: list[list[int]]) -> None:
        """Others find nothing wrong under any prompt, and everything under the ``readable`` ones."""
        with self.place.observer() as other:
            for tokens in self.prompts:
                self.check(tokens, other.retrieve(tokens))
            for tokens in readable:
                assert other.lookup(tokens) == len(tokens)


def wait_clean(server: Server, seconds: float = 10.0) -> None:
    """In the end a server has no lock, reservation, session or registration left."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return check_clean(server)
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def resources() -> dict[str, int]:
    """What this process holds of its operating system."""
    pools = Path("/proc/self/maps").read_text().count("lmcache_l1_pool_")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mapped pools": pools,
    }


def wait_for_resources(before: dict[str, int], seconds: float = 10.0) -> None:
    """No more of anything than before; I/O threads end a moment after they were told to."""
    wait_until(
        lambda: all(now <= before[name] for name, now in resources().items()),
        f"before {before}, and now {resources()}",
        seconds,
    )
