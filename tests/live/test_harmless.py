"""Harmless to production: a serving engine's answers and hit counter stay the same, whatever clients do beside it.

Every test compares what the engine says, and how many tokens of the prompts it took from the cache, before, during and
after clients do what its name says.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import torch

from kvdata import Connection, KVLayout
from kvdata.errors import GeometryMismatch, InvalidRequest
from tests.live.conftest import PREFIX
from tests.live.stack import CHUNK, VLLM
from tests.live.test_live import until
from tests.servers import Server

MAX_SECONDS = 60.0


def hit_tokens(engine: VLLM) -> int:
    """Prompt tokens that the engine did not compute, by its own count."""
    text = httpx.get(engine.url + "/metrics", timeout=30, trust_env=False).text
    counts = re.findall(r"^vllm:external_prefix_cache_hits_total(?:{[^}]*})? (\S+)", text, re.MULTILINE)
    return int(sum(map(float, counts)))


@dataclass(frozen=True)
class Seen:
    """The engine from outside: its answers, the prompt tokens it took from the cache, and its registration."""

    answers: list[list[int]]
    hits: int
    registration: dict[str, Any]


@pytest.fixture
def look(server: Server, engine: VLLM, prompts: list[list[int]], connection: Connection) -> Callable[[], Seen]:
    """Asks the engine for prompts whose caches are there."""
    asked = prompts[6:8]
    with connection.connect() as ctx:
        for prompt in asked:
            engine.complete(prompt, max_tokens=1)
            assert until(lambda p=prompt: ctx.lookup(p)) == PREFIX

    def look() -> Seen:
        before = hit_tokens(engine)
        answers = [engine.complete(prompt) for prompt in asked]
        return Seen(answers, hit_tokens(engine) - before, server.status()["cache_context_meta"])

    return look


@contextmanager
def again_and_again(clients: list[Callable[[], None]]) -> Iterator[Callable[[], int]]:
    """Each client in a thread of its own until the block ends; how many rounds the slowest has finished.

    A client's error is raised where the rounds are asked for.
    """
    end, rounds, errors = threading.Event(), [0] * len(clients), list[BaseException]()

    def work(number: int) -> None:
        try:
            while not end.is_set():
                clients[number]()
                rounds[number] += 1
        except BaseException as exc:
            errors.append(exc)

    def finished() -> int:
        for error in errors:
            raise error
        return min(rounds)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(clients))]
    for thread in threads:
        thread.start()
    try:
        yield finished
    finally:
        end.set()
        for thread in threads:
            thread.join(MAX_SECONDS)
    assert not [thread for thread in threads if thread.is_alive()]
    finished()


def stays_the_same(look: Callable[[], Seen], clients: list[Callable[[], None]]) -> None:
    """Before, after, and during a whole round of each client at least."""
    before = look()
    assert before.hits == PREFIX * len(before.answers)
    assert before.registration
    during, deadline = list[Seen](), time.monotonic() + MAX_SECONDS
    with again_and_again(clients) as finished:
        while not finished():
            assert time.monotonic() < deadline, "the clients do not get on"
            time.sleep(0.01)
        first = finished()
        while finished() < first + 2:
            assert time.monotonic() < deadline, "the clients do not get on beside the engine"
            during.append(look())
    for seen in (*during, look()):
        assert seen.hits == before.hits
        assert seen.registration == before.registration
        assert seen.answers == before.answers


def test_clients_come_and_go_with_right_and_wrong_layouts(look, connection, prompts):
    """Registering is not neutral on LMCache: under the engine's name it would change what the engine stores."""

    def right() -> None:
        with connection.connect() as ctx:
            assert ctx.lookup(prompts[6]) == PREFIX

    def wrong() -> None:
        other = replace(connection, layout=KVLayout(num_layers=12, num_kv_heads=3, head_dim=64))
        with pytest.raises(GeometryMismatch, match="registered"):
            other.connect()

    stays_the_same(look, [right, wrong])


def test_readers_at_full_speed(look, connection, prompts):
    """Lookups and retrieves as fast as they go, from several contexts: the engine never has to give up."""
    asked = [prompt[:PREFIX] for prompt in prompts[6:8]]

    def reads() -> None:
        with connection.connect() as ctx:
            for _ in range(5):
                assert ctx.lookup_many(asked * 8) == [PREFIX] * 16
                found = ctx.retrieve_many(asked * 2)
                assert [kv.shape[2] for kv in found] == [PREFIX] * 4

    stays_the_same(look, [reads, reads, reads])


def test_writers_at_the_engines_own_addresses(look, connection, prompts):
    """What is there is never overwritten: a store of other KV at the engine's addresses changes nothing."""
    theirs = prompts[6][:PREFIX]
    with connection.connect() as ctx:
        expected = ctx.retrieve(theirs)

    def overwrites() -> None:
        with connection.connect() as ctx:
            assert ctx.store(torch.zeros_like(expected), theirs) is False  # nothing was written
            assert torch.equal(ctx.retrieve(theirs), expected)

    stays_the_same(look, [overwrites, overwrites])


def test_writers_that_fail_half_way(look, server, connection, prompts, monkeypatch):
    """Between the reservation and the commit: nobody, the engine included, ever sees those chunks."""
    import kvdata.client.transfer as transfer

    victim = threading.local()
    copy_all = transfer.copy_all

    def fails_for_victims(*arguments: Any, **options: Any) -> Any:
        if getattr(victim, "fails", False):
            raise RuntimeError("the copy failed")
        return copy_all(*arguments, **options)

    monkeypatch.setattr(transfer, "copy_all", fails_for_victims)
    theirs = prompts[6][:PREFIX]
    with connection.connect() as ctx:
        kv = ctx.retrieve(theirs)
        numbers = itertools.count()

        def fails() -> None:
            address = [next(numbers) % 40_000, *theirs[1:]]
            victim.fails = True
            with connection.connect() as mine, pytest.raises(RuntimeError, match="the copy failed"):
                mine.store(kv, address, "half-way")
            victim.fails = False
            assert ctx.lookup(address, "half-way") == 0

        stays_the_same(look, [fails])
    manager = server.status()["storage_manager"]["l1_manager"]
    assert (manager["write_locked_count"], manager.get("staging_object_count", 0)) == (0, 0)


def test_objects_of_a_wrong_shape_are_refused(look, connection, prompts):
    """An engine that reads an object of another size from its own addresses goes wrong: none is ever stored."""
    theirs = prompts[7][:PREFIX]
    with connection.connect() as ctx:
        kv = ctx.retrieve(theirs)
        wrong = [kv[:, :-1], kv[..., :-1], kv[:1], kv[:, :, : PREFIX // 2], kv.transpose(1, 2)]

        def stores() -> None:
            for tensor in wrong:
                with pytest.raises(InvalidRequest):
                    ctx.store(tensor, theirs, "wrong-shape")
            assert ctx.lookup(theirs, "wrong-shape") == 0
            ctx.store(kv[:, :, :CHUNK], theirs[:CHUNK], "right-shape")  # once: a full pool would evict the engine's

        stays_the_same(look, [stores])
