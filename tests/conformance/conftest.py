"""The suite takes the server as a parameter: embedded or real, shared memory or pickle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvdata import Connection, KVCacheContext, KVLayout
from tests.servers import Server

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8)
MODEL = "tests/model"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kinds = ["embedded"]
    if metafunc.config.getoption("--lmcache"):
        kinds.append("lmcache")
    if "server" in metafunc.fixturenames:
        params = [(kind, transfer) for kind in kinds for transfer in ("shm", "pickle")]
        metafunc.parametrize("server", params, indirect=True, ids=["-".join(p) for p in params], scope="session")
    elif "own_server" in metafunc.fixturenames:
        metafunc.parametrize("own_server", kinds, indirect=True)


def _server(request: pytest.FixtureRequest, kind: str, transfer: str, **options: int) -> Server:
    command = kind if kind == "embedded" else request.config.getoption("--lmcache")
    return Server(command, transfer, **options)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One server for all tests of a kind and transfer."""
    running = _server(request, *request.param).start()
    yield running
    running.stop()


@pytest.fixture
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of this test's own with a pool of 20 MiB: to be filled, stopped, killed."""
    running = _server(request, request.param, "shm", pool_mb=20).start()
    yield running
    running.stop()
    assert not Path(f"/dev/shm/lmcache_l1_pool_{running.shm_name}").exists()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no lock, no reservation, no session, no registration on the server."""
    yield
    if "server" in request.fixturenames:
        check_clean(request.getfixturevalue("server"))


def check_clean(server: Server) -> None:
    status = server.status()
    manager = status["storage_manager"]["l1_manager"]
    assert manager["read_locked_count"] == 0
    assert manager["write_locked_count"] == 0
    assert manager.get("staging_object_count", 0) == 0
    assert status["active_sessions"] == 0
    assert status["non_cuda_context_meta"] == {}


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., KVCacheContext]]:
    """Open contexts on the server; closed at the end of the test."""
    opened: list[KVCacheContext] = []

    def _connect(layout: KVLayout | None = LAYOUT, model: str = MODEL, timeout: float = 20.0) -> KVCacheContext:
        opened.append(Connection(server.url, server.http_url, model, timeout, layout).connect())
        return opened[-1]

    yield _connect
    for ctx in opened:
        ctx.close()


_next_token = iter(range(1, 2**31, 4096))


def fresh_tokens(count: int) -> list[int]:
    """Token ids that no other test uses."""
    first = next(_next_token)
    return list(range(first, first + count))


def random_kv(tokens: int, layout: KVLayout = LAYOUT) -> torch.Tensor:
    return torch.randn(2, layout.num_layers, tokens, layout.hidden).to(layout.dtype)
