"""Options and leak checks shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# No test depends on how fast the machine is; the same examples each time, so that a red run can be repeated.
settings.register_profile("kvdata", deadline=None, derandomize=True)
settings.load_profile("kvdata")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lmcache",
        action="append",
        help="path of a real lmcache command (or several, one a line): the conformance suite runs on its server too",
    )
    parser.addoption("--long", action="store_true", help="all points of the tests of faults, not one of each kind")
    parser.addoption("--compatibility", type=Path, help="file whose table of outcomes the conformance suite updates")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes; only with --long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        left = [item for item in items if item.get_closest_marker("long") is None]
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long") is not None])
        items[:] = left


def lmcache_commands(config: pytest.Config) -> list[str]:
    """The commands of ``--lmcache``, or of the variable KVDATA_LMCACHE."""
    given: list[str] = config.getoption("--lmcache") or [os.environ.get("KVDATA_LMCACHE", "")]
    return "\n".join(given).split("\n") if any(given) else []


@pytest.fixture(autouse=True)
def no_new_shared_memory() -> Iterator[None]:
    """Fail the test that leaves a name of this process in shared memory."""
    mine = (f"lmcache_l1_pool_kvdata-{os.getpid()}-", f"torch_{os.getpid()}_")  # other processes may run beside us

    def names() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(mine)}

    before = names()  # with the pools of servers of a wider scope, which are set up earlier
    yield
    assert not names() - before, f"left in /dev/shm: {names() - before}"
