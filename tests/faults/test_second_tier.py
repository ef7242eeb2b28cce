"""Hits that only a server's second tier holds: they are loaded while a lookup waits, and live as long as its locks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdata.errors import ServerTimeout
from tests.faults.checks import PATIENCE, Corpus, Place, in_time, wait_clean, wait_until
from tests.faults.conftest import fault_servers, opened
from tests.faults.test_held import clear
from tests.servers import Server, release_of

pytestmark = pytest.mark.long
FAST = {"type": "fs", "base_path": "?"}
SLOW = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 0.001}  # a chunk of 1 MiB takes a second


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kinds = [kind for kind in fault_servers(metafunc.config) if release_of(kind) >= (0, 5, 6)]
    metafunc.parametrize("kind", kinds or [pytest.param("", marks=pytest.mark.skip(reason="needs --lmcache"))])


@pytest.fixture
def tiered(request: pytest.FixtureRequest, kind: str, tmp_path: Path, no_leaks: None) -> Iterator[Place]:
    adapter = {key: str(tmp_path) if value == "?" else value for key, value in request.param.items()}
    running = Server(kind, "shm", pool_mb=40, flags=["--l2-adapter", json.dumps(adapter)]).start()
    try:
        yield from opened(running)
        wait_clean(running)
    finally:
        running.stop()


@pytest.mark.parametrize("tiered", [FAST], indirect=True)
def test_what_only_the_second_tier_holds_is_found_and_right(tiered):
    corpus = Corpus(tiered)
    ctx = tiered.connect(timeout=PATIENCE)
    prompts = [corpus.stored(ctx, 4) for _ in range(3)]

    def only_there() -> bool:
        clear(tiered, True)
        return all(ctx.lookup(tokens) == len(tokens) for tokens in prompts)

    wait_until(only_there, "not in the second tier")
    for _ in range(3):
        clear(tiered, True)
        for tokens, kv in zip(prompts, ctx.retrieve_many(prompts), strict=True):
            assert corpus.check(tokens, kv)
    assert ctx.store(corpus.caches[0], prompts[0]) is False
    corpus.works_again(ctx)


@pytest.mark.parametrize("tiered", [SLOW], indirect=True)
def test_a_second_tier_that_is_slower_than_a_call_may_take(tiered):
    """The call ends in time; what the server has loaded and locked for it afterwards is given back."""
    corpus = Corpus(tiered)
    patient = tiered.connect(timeout=PATIENCE)
    tokens = corpus.stored(patient, 4)
    wait_until(lambda: clear(tiered, True) or patient.lookup(tokens) == len(tokens), "not in the second tier", 90)
    clear(tiered, True)
    ctx = tiered.connect()
    with in_time(), pytest.raises(ServerTimeout) as caught:
        ctx.retrieve(tokens)
    tiered.names(caught.value, "retrieve")
    assert corpus.check(tokens, patient.retrieve(tokens))
    ctx.connection = patient.connection  # more time, as the error suggests
    corpus.works_again(ctx)
