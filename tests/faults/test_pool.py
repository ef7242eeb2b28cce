"""The server's shared memory goes, shrinks, or another takes its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdata.errors import ServerError
from tests.faults.checks import PATIENCE, SLACK, in_time
from tests.faults.test_held import beside


def gone(pool: Path, aside: Path) -> None:
    pool.rename(aside)


def replaced(pool: Path, aside: Path) -> None:
    size = pool.stat().st_size
    pool.rename(aside)
    pool.touch(0o600)
    os.truncate(pool, size)


def shrunk(pool: Path, aside: Path) -> None:
    pool.rename(aside)
    pool.touch(0o600)
    os.truncate(pool, 4096)


@pytest.fixture
def restored(place) -> Iterator[tuple[Path, Path]]:
    """The pool's file and where to put it meanwhile; back at its place in the end."""
    pool, aside = place.server.pool, place.server.pool.with_suffix(".aside")
    yield pool, aside
    if aside.exists():
        aside.replace(pool)


HARMS = [gone, replaced, shrunk]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(("call", "operation"), [("retrieve", "prepare_retrieve"), ("store", "prepare_store")])
def test_between_prepare_and_copy(
    place, corpus, restored, harm: Callable[[Path, Path], None], call: str, operation: str
):
    """Nothing is read from memory that is not the server's, and nothing written there is called stored."""
    if operation == "prepare_store" and place.server.release < (0, 5, 6):
        pytest.skip("stores go in one message there")
    ctx = place.connect(timeout=PATIENCE)
    there = corpus.stored(ctx)
    tokens, kv = corpus.fresh()
    gate = place.proxy.gate("after", operation)
    called = beside((lambda: ctx.store(kv, tokens)) if call == "store" else (lambda: ctx.retrieve(there)))
    gate.wait()
    harm(*restored)
    gate.open()
    error = called.exception(PATIENCE + SLACK)
    assert isinstance(error, ServerError)
    place.names(error, call)
    restored[1].replace(restored[0])
    corpus.works_again(ctx)


@pytest.mark.parametrize("harm", HARMS)
def test_between_two_calls(place, corpus, restored, harm: Callable[[Path, Path], None]):
    ctx = place.connect()
    there = corpus.stored(ctx)
    tokens, kv = corpus.fresh()
    harm(*restored)
    for operation, call in (("retrieve", lambda: ctx.retrieve(there)), ("store", lambda: ctx.store(kv, tokens))):
        with in_time(), pytest.raises(ServerError) as caught:
            call()
        place.names(caught.value, operation)
    restored[1].replace(restored[0])
    assert corpus.check(there, ctx.retrieve(there))
    corpus.works_again(ctx)
