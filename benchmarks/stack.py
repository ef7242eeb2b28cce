"""The processes a measurement needs: a server, the stand-in of an engine, LMCache's SDK at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Work
from benchmarks.processes import Upstream, engine
from kvdata import Connection, KVCacheContext, KVLayout
from tests.live import stack as live
from tests.live.environments import command
from tests.servers import Server

EIGHT_B = KVLayout(num_layers=36, num_kv_heads=8, head_dim=128)
# Lookups move no KV: their prefixes are stored in a geometry so small that 64 of them take 4 MB.
SMALL = KVLayout(num_layers=1, num_kv_heads=1, head_dim=16)


@dataclass(frozen=True)
class Sizes:
    """How much is moved."""

    layout: KVLayout = EIGHT_B
    chunk: int = 256
    prefix: int = 2048  # tokens of a retrieve or store
    samples: int = 8
    sample: int = 1024  # tokens of one sample of the data set
    batch: int = 2
    lookups: int = 64
    pool_mb: int = 3072


class Stack:
    """One server and who talks to it.

    Args:
        server: the running server.
        sizes: of everything that is measured.
        upstream: LMCache's SDK, where it can be run.
        served: an engine has registered the models.
    """

    def __init__(self, server: Server, sizes: Sizes, upstream: Upstream | None, served: bool) -> None:
        self.server, self.sizes, self.upstream, self._served = server, sizes, upstream, served
        self._random = np.random.default_rng(0)
        self._contexts = ExitStack()

    @property
    def kind(self) -> str:
        """``embedded`` or ``lmcache``."""
        return "embedded" if self.server.kind == "embedded" else "lmcache"

    def connection(self, small: bool = False, **options: Any) -> Connection:
        """To the model in the full geometry or the small one. An engine tells which, where there is one."""
        name, layout = ("bench/small", SMALL) if small else ("bench/model", self.sizes.layout)
        known = {} if self._served else {"layout": layout}
        return Connection(self.server.url, self.server.http_url, name, **{**known, **options})

    def connect(self, connection: Connection) -> KVCacheContext:
        """A context that is closed with the stack."""
        return self._contexts.enter_context(connection.connect())

    @cached_property
    def ctx(self) -> KVCacheContext:
        """Of the full geometry."""
        return self.connect(self.connection())

    @cached_property
    def small(self) -> KVCacheContext:
        """Of the small geometry."""
        return self.connect(self.connection(small=True))

    @cached_property
    def kv(self) -> torch.Tensor:
        """``[2, L, T, D]`` random bfloat16, ``T`` the length of a retrieve or store."""
        layout, tokens = self.sizes.layout, self.sizes.prefix
        return torch.zeros(2, layout.num_layers, tokens, layout.hidden, dtype=layout.dtype).normal_()

    @cached_property
    def prefix(self) -> list[int]:
        """Tokens under which `kv` is stored."""
        tokens = self.tokens(self.sizes.prefix)
        self.ctx.store(self.kv, tokens)
        return tokens

    @cached_property
    def prefixes(self) -> list[list[int]]:
        """The data set's prefixes, stored."""
        prefixes = [self.tokens(self.sizes.sample) for _ in range(self.sizes.samples)]
        for tokens in prefixes:
            self.ctx.store(self.kv[:, :, : self.sizes.sample], tokens)
        return prefixes

    def tokens(self, count: int) -> list[int]:
        """Fresh token ids of a vocabulary of 128,000."""
        ids: list[int] = self._random.integers(128_000, size=count).tolist()
        return ids

    def gigabytes(self, tokens: int, layers: int | None = None) -> float:
        """10^9 bytes of KV of so many tokens in the full geometry, or of some of its layers."""
        layout = self.sizes.layout
        return tokens * layout.token_bytes * (layers or layout.num_layers) / layout.num_layers / 1e9

    def theirs(self, operation: str, small: bool = False, **job: Any) -> Work | None:
        """A piece of work for LMCache's SDK (an operation of `benchmarks.upstream`), where it can be run."""
        upstream, model = self.upstream, self.connection(small).model_name
        return None if upstream is None else lambda: upstream(operation, model, **job)

    def release(self) -> None:
        """End the DataLoader workers of LMCache's SDK."""
        if self.upstream is not None:
            self.upstream.release()

    def close(self) -> None:
        """Close what this process has opened."""
        self._contexts.close()


@contextmanager
def running(kind: str, sizes: Sizes, with_upstream: bool = True) -> Iterator[Stack]:
    """A `Stack` on a server of its own, all ended afterwards.

    Args:
        kind: ``lmcache`` or ``embedded``.
        sizes: of everything that is measured.
        with_upstream: run LMCache's SDK beside it.
    """
    live.LOGS.mkdir(parents=True, exist_ok=True)
    python = command("lmcache").with_name("python") if with_upstream or kind == "lmcache" else None
    with ExitStack() as processes:
        server = processes.enter_context(_server(kind, sizes))
        if kind == "lmcache":
            assert python
            processes.enter_context(engine(python, server, {"bench/model": sizes.layout, "bench/small": SMALL}))
        upstream = Upstream(python, server) if python and with_upstream else None
        if upstream:
            processes.callback(upstream.close)
        stack = Stack(server, sizes, upstream, served=kind == "lmcache")
        processes.callback(stack.close)
        yield stack


@contextmanager
def _server(kind: str, sizes: Sizes) -> Iterator[Server]:
    if kind == "lmcache":
        with live.lmcache(sizes.chunk, sizes.pool_mb, name="bench-lmcache") as server:
            yield server
        return
    server = Server("embedded", "shm", sizes.chunk, sizes.pool_mb)
    try:
        yield server.start()
    finally:
        server.stop()
