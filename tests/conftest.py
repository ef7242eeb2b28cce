"""Options and leak checks shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lmcache",
        default=os.environ.get("KVDATA_LMCACHE"),
        help="path of a real lmcache command: the conformance suite runs against its server too",
    )


@pytest.fixture(autouse=True)
def no_new_shared_memory() -> Iterator[None]:
    """Fail the test that leaves a name in shared memory which was not there before."""
    before = set(Path("/dev/shm").iterdir())
    yield
    ours = [p.name for p in set(Path("/dev/shm").iterdir()) - before if "kvdata" in p.name or "torch_" in p.name]
    # Servers of a wider scope make their pool while the first test that asks for them is set up.
    leaked = [name for name in ours if not name.startswith("lmcache_l1_pool_kvdata-test-")]
    assert not leaked, f"left in /dev/shm: {leaked}"
