"""Many at once: writers of the same chunks, threads on one context, processes on one server, a full pool."""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from kvdata import Connection, KVCacheContext
from kvdata.errors import KVCacheSDKError, PoolFull, StoreConflict
from tests.faults.checks import CHUNK, LAYOUT, PATIENCE, checksum, in_time
from tests.faults.test_held import beside, clear
from tests.faults.test_kills import spawning  # noqa: F401 - a fixture


def test_two_writers_of_the_same_chunks(place, corpus):
    """The second is told while the first is at it; nobody ever reads a mixture, or what is not finished."""
    if place.server.release < (0, 5, 6):
        pytest.skip("stores go in one message there")
    first, second = place.connect(timeout=PATIENCE), place.connect(timeout=6.0)
    tokens, kv = corpus.fresh(4)
    gate = place.proxy.gate("before", "commit_store")
    writing = beside(lambda: first.store(kv, tokens))
    gate.wait()
    assert second.retrieve(tokens) is None
    with in_time(6.0), pytest.raises(StoreConflict) as caught:
        second.store(kv.neg(), tokens)
    place.names(caught.value, "store")
    gate.open()
    assert writing.result(PATIENCE) is True
    assert second.store(kv.neg(), tokens) is False
    corpus.check_all_visible([tokens])


@pytest.mark.parametrize("seconds", [6.0, 3.0])
def test_a_pool_full_of_what_is_being_read(place, corpus, seconds):
    """Said so within the time-out, however short: not that this was used up."""
    ctx = place.connect(timeout=seconds)
    clear(place, True)
    held = corpus.stored(ctx, 28)
    tokens, kv = corpus.fresh(16)
    with ctx.lease(held), in_time(seconds), pytest.raises(PoolFull) as caught:
        ctx.store(kv, tokens)
    place.names(caught.value, "store")
    if place.server.release >= (0, 5, 2):
        ctx.delete(held)
    corpus.works_again(ctx)


def content(number: int, round_: int) -> tuple[list[int], torch.Tensor]:
    """Prompt and cache of a writer's round: any process can compute both."""
    seed = int.from_bytes(hashlib.blake2b(f"{number} {round_}".encode(), digest_size=4).digest(), "big") >> 1
    kv = torch.randn(2, LAYOUT.num_layers, CHUNK, LAYOUT.hidden, generator=torch.Generator().manual_seed(seed))
    return [seed + i for i in range(CHUNK)], kv.to(LAYOUT.dtype)


def work(ctx: KVCacheContext, number: int, rounds: int) -> dict[str, int]:
    """Store, read back, read another's; more than the pool holds. Counts of what came of it."""
    counts = {"stored": 0, "hit": 0, "miss": 0, "wrong": 0, "refused": 0}
    for round_ in range(rounds):
        try:
            counts["stored"] += ctx.store(content(number, round_)[1], content(number, round_)[0])
        except (PoolFull, StoreConflict):
            counts["refused"] += 1
        for tokens, kv in (content(number, round_), content(number + 1, round_)):
            found = ctx.retrieve(tokens)
            if found is None:
                counts["miss"] += 1
            else:
                counts["hit" if checksum(found) == checksum(kv) else "wrong"] += 1
    return counts


def test_thirty_two_threads_on_one_context(place):
    ctx = place.connect(timeout=PATIENCE)
    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda n: work(ctx, n, 2), range(32)))
    total = {name: sum(counts[name] for counts in results) for name in results[0]}
    assert total["wrong"] == 0
    assert total["hit"] > 0
    assert total["hit"] + total["miss"] == 32 * 2 * 2
    assert total["stored"] + total["refused"] <= 32 * 2


def process(connection: Connection, number: int, results) -> None:
    torch.set_num_threads(1)
    with connection.connect() as ctx, ThreadPoolExecutor(4) as pool:
        for counts in pool.map(lambda n: work(ctx, n, 3), range(4 * number, 4 * number + 4)):
            results.put(counts)


@pytest.mark.long
def test_eight_processes_of_four_threads(spawning, place):  # noqa: F811
    results = spawning.Queue()
    processes = [
        spawning.Process(target=process, args=(place.connection(PATIENCE), number, results)) for number in range(8)
    ]
    for one in processes:
        one.start()
    counts = [results.get(timeout=3 * PATIENCE) for _ in range(32)]
    for one in processes:
        one.join(PATIENCE)
        assert one.exitcode == 0
        one.close()
    results.close()
    results.join_thread()
    assert sum(c["wrong"] for c in counts) == 0
    assert sum(c["hit"] + c["miss"] for c in counts) == 32 * 3 * 2


@pytest.mark.long
def test_threads_of_one_context_while_connections_break(impatient_place, corpus):
    """A socket is one thread's at a time, whatever breaks: no crash, no foreign error, right tensors."""
    ctx = impatient_place.connect(timeout=PATIENCE)
    prompts = [corpus.stored(ctx) for _ in range(4)]
    errors: list[BaseException] = []
    stop = threading.Event()

    def read(number: int) -> None:
        while not stop.is_set():
            try:
                corpus.check(prompts[number % 4], ctx.retrieve(prompts[number % 4]))
            except KVCacheSDKError as error:
                impatient_place.names(error, "retrieve")
            except BaseException as error:
                errors.append(error)
                raise

    threads = [threading.Thread(target=read, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        impatient_place.proxy.cut()
        time.sleep(0.2)  # not to wait for anything: so that calls are under way when the next one comes
    stop.set()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    assert not errors
    corpus.works_again(ctx)


@pytest.mark.parametrize("operation", ["lookup", "prepare_retrieve", "commit_store"])
def test_a_connection_that_breaks(place, corpus, operation):
    """The call goes on over a new one, which also gives back what was held over the old: the server still runs."""
    ctx = place.connect(timeout=PATIENCE)
    there = corpus.stored(ctx)
    tokens, kv = corpus.fresh()
    gate = place.proxy.gate("after", operation)
    called = beside((lambda: ctx.store(kv, tokens)) if "store" in operation else (lambda: ctx.retrieve(there)))
    gate.wait()
    place.proxy.cut()
    gate.open()
    if "store" in operation:
        called.result(PATIENCE)
        corpus.check_all_visible([there, tokens])
    else:
        assert corpus.check(there, called.result(PATIENCE))
    corpus.works_again(ctx)


def test_a_connection_that_breaks_under_a_reservation(impatient_place, corpus):
    """What is reserved was never told: the chunks are free again when the server's time-out has passed."""
    if impatient_place.server.release < (0, 5, 6):
        pytest.skip("stores go in one message there")
    ctx = impatient_place.connect(timeout=PATIENCE)
    tokens, kv = corpus.fresh()
    gate = impatient_place.proxy.gate("after", "prepare_store")
    called = beside(lambda: ctx.store(kv, tokens))
    gate.wait()
    impatient_place.proxy.cut()
    gate.open()
    with suppress(StoreConflict):  # unless the time-out passes within the call
        called.result(PATIENCE)
    corpus.store_once_free(ctx, tokens, kv)
    corpus.check_all_visible([tokens])
    corpus.works_again(ctx)
