"""The suite takes the server as a parameter: embedded or real, shared memory or pickle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdata import Connection, KVCacheContext, KVLayout
from kvdata.errors import UnsupportedServer
from tests.conformance.compatibility import ANY, Row, Table, render, update
from tests.conftest import lmcache_commands
from tests.servers import Server, release_of

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8)
MODEL = "tests/model"
TABLE = Table()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "embedded: about what only the embedded server does")
    config.addinivalue_line("markers", "once: runs a whole program, which the transfer makes no difference to")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kinds = ["embedded"]
    if metafunc.definition.get_closest_marker("embedded") is None:
        kinds += lmcache_commands(metafunc.config)
    if "server" in metafunc.fixturenames:
        once = metafunc.definition.get_closest_marker("once") is not None
        params = [(kind, transfer) for kind in kinds for transfer in (("shm",) if once else ("shm", "pickle"))]
        ids = [f"{_name(kind)}-{transfer}" for kind, transfer in params]
        metafunc.parametrize("server", params, indirect=True, ids=ids, scope="session")
    elif "own_server" in metafunc.fixturenames:
        metafunc.parametrize("own_server", kinds, indirect=True, ids=[_name(kind) for kind in kinds])


def _name(kind: str) -> str:
    return kind if kind == "embedded" else f"lmcache-{_version(kind)}"


def _version(kind: str) -> str:
    return ".".join(map(str, release_of(kind)))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Write down which row of the table a test belongs to, for the reports of it."""
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    kind, transfer = params.get("server") or (params.get("own_server"), "shm")
    if kind is not None:
        server = kind if kind == "embedded" else "LMCache"
        row: Row = (server, _version(kind), transfer, params.get("packing", ANY))
        item.user_properties.append(("row", row))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    row = dict(report.user_properties).get("row")
    if isinstance(row, tuple) and (report.when == "call" or report.outcome != "passed"):
        TABLE.add(row, report.nodeid, report.outcome)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts, file = TABLE.counts(), config.getoption("--compatibility")
    if counts:
        terminalreporter.section("conformance")
        terminalreporter.write_line(render(counts))
    if counts and file is not None:
        if terminalreporter.stats.get("deselected"):
            terminalreporter.write_line(f"{file} is left as it is: not all tests ran")
        else:
            update(file, counts)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One server for all tests of a kind and transfer."""
    running = Server(*request.param).start()
    yield running
    running.stop()


@pytest.fixture
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server of this test's own with a pool of 20 MiB: to be filled, stopped, killed. Its log stays for a while."""
    running = Server(request.param, "shm", pool_mb=20, log=tmp_path / "server.log").start()
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

    def _connect(
        layout: KVLayout | None = LAYOUT, model: str = MODEL, timeout: float = 20.0, **options: Any
    ) -> KVCacheContext:
        opened.append(Connection(server.url, server.http_url, model, timeout, layout, **options).connect())
        return opened[-1]

    yield _connect
    for ctx in opened:
        ctx.close()


def delete_is_refused(server: Server, ctx: KVCacheContext, tokens: list[int]) -> bool:
    """Whether the server's release cannot delete; if so, the client says it, and names the release."""
    if server.release >= (0, 5, 2):
        return False
    with pytest.raises(UnsupportedServer, match=rf"LMCache {_version(server.kind)} cannot delete"):
        ctx.delete(tokens)
    return True


_next_token = iter(range(1, 2**31, 4096))


def fresh_tokens(count: int) -> list[int]:
    """Token ids that no other test uses."""
    first = next(_next_token)
    return list(range(first, first + count))


def random_kv(tokens: int, layout: KVLayout = LAYOUT) -> torch.Tensor:
    return torch.randn(2, layout.num_layers, tokens, layout.hidden).to(layout.dtype)
