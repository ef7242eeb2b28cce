"""An embedded server in this process, for units that need one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvdata import Connection, KVCacheContext, KVLayout
from kvdata.server import EmbeddedServer
from kvdata.server.service import Service

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8)


@pytest.fixture(scope="module")
def embedded() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(chunk_size=32, pool_bytes=16 << 20) as server:
        yield server


@pytest.fixture
def connection(embedded: EmbeddedServer) -> Connection:
    return Connection(embedded.url, embedded.http_url, "unit/model", 30.0, LAYOUT)


@pytest.fixture
def ctx(connection: Connection) -> Iterator[KVCacheContext]:
    with connection.connect() as opened:
        yield opened


@pytest.fixture
def lie(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Any], Any]], None]:
    """Makes the embedded server answer an operation with what a function makes of the true answer."""

    def install(operation: str, change: Callable[[Any], Any]) -> None:
        true = getattr(Service, operation)

        def answer(self: Service, *arguments: Any) -> Any:
            return change(true(self, *arguments))

        answer.__annotations__ = true.__annotations__
        monkeypatch.setattr(Service, operation, answer)

    return install


_next_token = iter(range(1, 2**31, 4096))


def fresh_tokens(count: int) -> list[int]:
    first = next(_next_token)
    return list(range(first, first + count))


def random_kv(tokens: int) -> torch.Tensor:
    return torch.randn(2, LAYOUT.num_layers, tokens, LAYOUT.hidden).to(LAYOUT.dtype)
