"""A server behind proxies that do harm, for each kind of server; and what must be left of it in the end: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.checks import LAYOUT, Corpus, Place, resources, wait_clean, wait_for_resources
from tests.faults.proxy import Proxy
from tests.faults.web import WebProxy
from tests.servers import Server, release_of

# Seconds after which a server of `impatient` forgets what its clients left: locks and reservations, then registrations.
# Later, because a real server publishes what these have reserved; and 30 s are the least that one takes.
TTL, REAL_TTL = 2, 3
GRACE, REAL_GRACE = 8, 30


def fault_servers(config: pytest.Config) -> list[str]:
    """The commands of ``--lmcache``; not the suite's variable: a real server's time-outs take half a minute each."""
    return "\n".join(config.getoption("--lmcache") or []).split()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in ("server", "impatient"):
        if name in metafunc.fixturenames:
            kinds = ["embedded", *fault_servers(metafunc.config)]
            ids = [kind if kind == "embedded" else "lmcache-" + ".".join(map(str, release_of(kind))) for kind in kinds]
            metafunc.parametrize(name, kinds, indirect=True, ids=ids, scope="session")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One server for all tests of a kind. A test may kill it, and starts it again then."""
    running = Server(request.param, "shm", pool_mb=40).start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def impatient(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One that soon gives up on clients that have gone."""
    running = Server(request.param, "shm", pool_mb=40, flags=_impatience(request.param)).start()
    yield running
    running.stop()


def _impatience(kind: str) -> list[str]:
    ttl, grace = (TTL, GRACE) if kind == "embedded" else (REAL_TTL, REAL_GRACE)
    flags = [f"--l1-write-ttl-seconds={ttl}", f"--l1-read-ttl-seconds={ttl}"]
    if release_of(kind) >= (0, 5, 0):  # older ones never forget a registration
        flags.append(f"--worker-registration-grace-seconds={grace}")
        flags += [] if kind == "embedded" else [f"--worker-reap-timeout-seconds={grace}"]
    if release_of(kind) >= (0, 5, 6):
        flags.append(f"--session-ttl-seconds={ttl}")
    return flags


@pytest.fixture(scope="session", autouse=True)
def _once_a_process() -> None:
    """What a process makes once, for its first copy, is no leak of a test."""
    import torch

    from kvdata.client.copying import copy_all

    kv = torch.zeros(LAYOUT.chunk_shape(4096), dtype=LAYOUT.dtype)
    copy_all([(torch.empty_like(kv), kv)])


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """This process has afterwards what it had before: descriptors, sockets, threads, mappings."""
    before = resources()
    yield
    wait_for_resources(before)


@pytest.fixture
def place(server: Server, no_leaks: None) -> Iterator[Place]:
    yield from opened(server)
    wait_clean(server)


@pytest.fixture
def impatient_place(impatient: Server, no_leaks: None) -> Iterator[Place]:
    yield from opened(impatient)
    wait_clean(impatient, 3 * REAL_GRACE)


def opened(server: Server) -> Iterator[Place]:
    """A place with proxies; all of it is closed afterwards."""
    there = Place(server, Proxy(server.url, server.release), WebProxy(server.http_url))
    yield there
    there.heal()
    for ctx in there.opened:
        ctx.close()
    there.web.close()
    there.proxy.close()


@pytest.fixture
def corpus(request: pytest.FixtureRequest) -> Corpus:
    name = "place" if "place" in request.fixturenames else "impatient_place"
    return Corpus(request.getfixturevalue(name))
