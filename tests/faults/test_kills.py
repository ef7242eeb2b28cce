"""kill -9 of the server, and of the client, at every point of a store and of a retrieve."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest
import torch

from kvdata import Connection
from kvdata.errors import KVCacheSDKError
from tests.faults.checks import PATIENCE, SLACK, wait_until
from tests.faults.conftest import REAL_TTL
from tests.faults.test_held import beside

# One point of each kind for `make test`; all of them for `make faults`.
STORE = [("before", "prepare_store"), ("after", "prepare_store"), ("before", "commit_store"), ("after", "commit_store")]
STORE += [("before", "lookup"), ("after", "lookup"), ("before", "end_session"), ("after", "end_session")]
RETRIEVE = [("before", "lookup"), ("after", "lookup"), ("before", "prepare_retrieve"), ("after", "prepare_retrieve")]
RETRIEVE += [("before", "commit_retrieve"), ("after", "commit_retrieve"), ("before", "end_session")]
POINTS = [("store", *point) for point in STORE] + [("retrieve", *point) for point in RETRIEVE]
SHORT = [
    ("store", "after", "prepare_store"),
    ("store", "after", "commit_store"),
    ("retrieve", "after", "prepare_retrieve"),
]


def points(short: list[tuple[str, str, str]]) -> list[object]:
    return [pytest.param(*p, id=" ".join(p), marks=[] if p in short else pytest.mark.long) for p in POINTS]


def skip_unless_it_happens(server, operation: str) -> None:
    if operation == "prepare_store" and server.release < (0, 5, 6):
        pytest.skip("stores go in one message there")


@pytest.mark.parametrize(("call", "where", "operation"), points(SHORT))
def test_the_server_is_killed_and_started_again(place, corpus, call, where, operation):
    skip_unless_it_happens(place.server, operation)
    ctx = place.connect(timeout=PATIENCE)
    there = corpus.stored(ctx)
    tokens, kv = corpus.fresh()
    gate = place.proxy.gate(where, operation)
    called = beside((lambda: ctx.store(kv, tokens)) if call == "store" else (lambda: ctx.retrieve(there)))
    gate.wait()
    place.server.kill()
    gate.open()
    started = time.monotonic()
    error = called.exception(PATIENCE + SLACK)
    assert time.monotonic() - started < SLACK + 5, "a server that has gone is noticed at once"
    assert error is None or isinstance(error, KVCacheSDKError)
    if error is not None:
        place.names(error, call)
    place.server.start()
    place.heal()
    corpus.check_all_visible([])
    corpus.works_again(ctx)


@pytest.fixture(scope="session")
def spawning() -> multiprocessing.context.BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.test_kills"])
    process = context.Process(target=time.monotonic)  # what a process needs for its first child is no leak of a test
    process.start()
    process.join(PATIENCE)
    process.close()
    return context


def client(connection: Connection, call: str, tokens: list[int], values: np.ndarray) -> None:
    """What the process does that is killed meanwhile; ``values`` are the cache's bits."""
    torch.set_num_threads(1)
    kv = torch.from_numpy(values).view(torch.bfloat16)
    with connection.connect() as ctx:
        if call == "store":
            ctx.store(kv, tokens)
        else:
            ctx.retrieve(tokens)
            ctx.lookup(tokens)  # what is given back without waiting goes on when something is waited for
        time.sleep(2 * PATIENCE)  # held at a reply nobody waits for: until it is killed


@pytest.mark.parametrize(("call", "where", "operation"), points(SHORT[:1]))
def test_the_client_is_killed(spawning, impatient_place, corpus, call, where, operation):
    """What it left is never seen, and gone after the server's time-outs."""
    server = impatient_place.server
    skip_unless_it_happens(server, operation)
    with impatient_place.observer() as other:
        there = corpus.stored(other)
        new, kv = corpus.fresh()
        tokens = new if call == "store" else there
        gate = impatient_place.proxy.gate(where, operation)
        values = kv.view(torch.int16).numpy()
        process = spawning.Process(target=client, args=(impatient_place.connection(PATIENCE), call, tokens, values))
        process.start()
        gate.wait()
        process.kill()
        process.join(PATIENCE)
        process.close()
        impatient_place.proxy.cut()  # as the operating system does with a dead process's connections
        gate.open()
        corpus.check_all_visible([there])

        def forgotten() -> bool:
            memory = server.memory()
            return not memory["read_locked_count"] and not memory["write_locked_count"]

        wait_until(forgotten, "locks or reservations were left", REAL_TTL + PATIENCE)
        corpus.check_all_visible([there])
        if other.lookup(new) < len(new):
            assert other.store(kv, new) is True
        corpus.check_all_visible([there, new])
    wait_until(
        lambda: not server.status()["active_sessions"] or server.release < (0, 5, 6), "a session was left", 3 * PATIENCE
    )
