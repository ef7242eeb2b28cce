"""A client that is held up in the middle of a call, while others and the server go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import httpx
import pytest

from kvdata import KVCacheContext
from kvdata.errors import KVCacheSDKError, LeaseLost, ServerTimeout, StoreFailed
from tests.faults.checks import CHUNK, PATIENCE, TIMEOUT, Corpus, in_time, wait_until
from tests.faults.proxy import drop


def beside(action: Callable[[], object]) -> Future:
    """Run it in a thread; the result, or what it raised, is the future's."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(action)
    pool.shutdown(wait=False)
    return future


def overwrite(corpus: Corpus, other: KVCacheContext, chunks: int = 28) -> None:
    """Store so much that memory which has become free is used again."""
    for _ in range(chunks // 4):
        corpus.stored(other, 4)


def clear(place, force: bool) -> None:
    body = {"tier": "l1", "force": force}
    path = "/cache/clear" if place.server.release >= (0, 5, 1) else "/clear-cache"
    httpx.post(place.server.http_url + path, json=body, timeout=20, trust_env=False).raise_for_status()


@pytest.mark.parametrize("point", ["lookup", "query_prefetch_status", "prepare_retrieve"])
@pytest.mark.parametrize(
    "force", [pytest.param(False, id="clear", marks=pytest.mark.long), pytest.param(True, id="forced clear")]
)
def test_cleared_and_used_again_while_a_reader_is_held_up(place, corpus, point, force):
    """What is copied out of memory that was given to others is not returned."""
    ctx = place.connect(timeout=PATIENCE)
    with place.observer() as other:
        tokens = corpus.stored(other, 4)
        gate = place.proxy.gate("after", point)
        reading = beside(lambda: ctx.retrieve(tokens))
        gate.wait()
        clear(place, force)
        overwrite(corpus, other)
        gate.open()
        corpus.check(tokens, reading.result(PATIENCE))
    corpus.works_again(ctx)


def test_a_reader_that_is_held_up_longer_than_its_locks_live(impatient_place, corpus):
    ctx = impatient_place.connect(timeout=PATIENCE)
    with impatient_place.observer() as other:
        tokens = corpus.stored(other, 4)
        gate = impatient_place.proxy.gate("after", "prepare_retrieve")
        reading = beside(lambda: ctx.retrieve(tokens))
        gate.wait()
        for _ in range(3):
            overwrite(corpus, other)
        wait_until(lambda: other.lookup(tokens) < len(tokens), "not evicted, so the lock did not expire")
        gate.open()
        corpus.check(tokens, reading.result(PATIENCE))
    corpus.works_again(ctx)


def test_a_lease_whose_chunks_were_given_to_others(place, corpus):
    """Nobody copied anything: all that can be said is that what was made of the views is worth nothing."""
    ctx = place.connect(timeout=PATIENCE)
    with place.observer() as other:

        def use(tokens: list[int], then: Callable[[], None]) -> None:
            with ctx.lease(tokens) as views:
                assert views
                clear(place, True)
                then()

        def fail() -> None:
            raise RuntimeError("the block's own")

        with pytest.raises(LeaseLost, match="lease again") as caught:
            use(corpus.stored(other, 4), lambda: overwrite(corpus, other))
        place.names(caught.value, "lease")
        with pytest.raises(RuntimeError, match="the block's own"):
            use(corpus.stored(other), fail)
    corpus.works_again(ctx)


def test_a_lease_that_outlives_its_locks_leaves_those_of_others_alone(impatient_place, corpus):
    """A server counts locks without their owners: what is released too late is another's."""
    ctx, server = impatient_place.connect(timeout=PATIENCE), impatient_place.server
    with impatient_place.observer() as other, ExitStack() as late:
        tokens = corpus.stored(other, 4)
        lost = late.enter_context(pytest.raises(LeaseLost, match="longer than"))
        late.enter_context(ctx.lease(tokens))
        wait_until(lambda: not server.memory()["read_locked_count"], "the locks did not expire")
        with other.lease(tokens):
            late.close()
            assert server.memory()["read_locked_count"] == 4
    impatient_place.names(lost.value, "lease")
    corpus.works_again(ctx)


def test_a_lookup_without_an_answer_leaves_the_locks_of_others_alone(place, corpus):
    """It found half of a prefix, and does not know; meanwhile another client has stored the rest, and reads it."""
    ctx = place.connect()
    tokens, kv = corpus.fresh(4)
    with place.observer() as other:
        assert other.store(kv[:, :, : 2 * CHUNK], tokens[: 2 * CHUNK]) is True
        place.proxy.replies("lookup", drop)
        with in_time(), pytest.raises(ServerTimeout):
            ctx.lookup(tokens)
        assert other.store(kv, tokens) is True
        with other.lease(tokens):
            corpus.works_again(ctx)  # on a new connection; what the old one held is given back over it
            ctx.close()
            assert place.server.memory()["read_locked_count"] == 4


def test_a_writer_that_is_held_up_longer_than_its_reservation_lives(impatient_place, corpus):
    """It neither writes into what was given to the next writer, nor publishes it."""
    if not impatient_place.server.release >= (0, 5, 6):
        pytest.skip("stores go in one message")
    ctx = impatient_place.connect(timeout=PATIENCE)
    tokens, kv = corpus.fresh(4)
    gate = impatient_place.proxy.gate("after", "prepare_store")
    late = beside(lambda: ctx.store(kv.neg(), tokens))
    gate.wait()
    with impatient_place.observer() as other:

        def stored() -> bool:
            with suppress(StoreFailed):  # still reserved
                return other.store(kv, tokens)
            return False

        wait_until(stored, "the reservation did not expire")
        overwrite(corpus, other)
        gate.open()
        error = late.exception(PATIENCE)
        assert isinstance(error, StoreFailed)
        impatient_place.names(error, "store")
        assert corpus.check(tokens, other.retrieve(tokens))
    corpus.check_all_visible([tokens])


@pytest.mark.parametrize("where", ["before", pytest.param("after", marks=pytest.mark.long)])
def test_a_reservation_that_comes_after_its_writer_has_given_up(place, corpus, where):
    """Un-registering must not publish what nobody has written."""
    if not place.server.release >= (0, 5, 6):
        pytest.skip("stores go in one message")
    ctx = place.connect()
    tokens, kv = corpus.fresh(4)
    gate = place.proxy.gate(where, "prepare_store")
    with in_time(), pytest.raises(KVCacheSDKError) as caught:
        ctx.store(kv, tokens)
    place.names(caught.value, "store")
    gate.open()
    corpus.works_again(ctx)  # on a new connection; the old one is put away with what it held
    corpus.check_all_visible([])
    with place.observer() as other:
        assert other.lookup(tokens) == 0
        assert other.store(kv, tokens) is True  # not blocked either
    ctx.close()
    corpus.check_all_visible([tokens])


def test_a_writer_that_gives_up_leaves_the_reservations_of_others_alone(place, corpus):
    """The same chunks are being written by somebody else when a store of them runs out of time."""
    if not place.server.release >= (0, 5, 6):
        pytest.skip("stores go in one message")
    first, second = place.connect(timeout=PATIENCE), place.connect()
    tokens, kv = corpus.fresh(4)
    commit = place.proxy.gate("before", "commit_store")
    winner = beside(lambda: first.store(kv, tokens))
    commit.wait()
    answer = place.proxy.gate("after", "prepare_store")
    with in_time(), pytest.raises(KVCacheSDKError):
        second.store(kv, tokens)
    answer.open()
    second.lookup(tokens)  # on a new connection: the old one has been put away
    assert place.server.memory()["write_locked_count"] == 4
    commit.open()
    assert winner.result(PATIENCE) is True
    corpus.check_all_visible([tokens])


def test_a_store_that_was_never_sent_deletes_nothing(place, corpus):
    """It waited for a connection in vain. Meanwhile others have stored the same, and read it."""
    ctx = place.connect(timeout=PATIENCE)
    there = corpus.stored(ctx)
    tokens, kv = corpus.fresh(4)
    gate = place.proxy.gate("after", "lookup")
    reading = beside(lambda: ctx.retrieve(there))
    gate.wait()
    ctx.connection = place.connection()
    waiting = beside(lambda: ctx.store(kv, tokens))
    with place.observer() as other:
        assert other.store(kv, tokens) is True
        with other.lease(tokens):
            assert isinstance(waiting.exception(PATIENCE), ServerTimeout)
            gate.open()
            assert corpus.check(there, reading.result(PATIENCE))
            corpus.works_again(ctx)  # on a new connection; the old one has been put away
            assert other.lookup(tokens) == len(tokens)


def test_threads_that_give_up_do_not_close_a_connection_in_use(place, corpus):
    """One thread's reconnection must not un-register the instance in whose name another is writing."""
    ctx = place.connect(timeout=PATIENCE)
    there = corpus.stored(ctx)
    tokens, kv = corpus.fresh(4)
    gate = place.proxy.gate("before", "commit_store")
    writing = beside(lambda: ctx.store(kv, tokens))
    gate.wait()
    ctx._sessions.current().mark_stale()  # as a time-out of another thread does
    assert corpus.check(there, ctx.retrieve(there))
    corpus.check_all_visible([there])
    assert not writing.done()
    gate.open()
    assert writing.result(PATIENCE) is True
    corpus.check_all_visible([there, tokens])


def test_threads_on_one_context_while_the_server_stands_still(place, corpus):
    ctx = place.connect()
    prompts = [corpus.stored(ctx) for _ in range(4)]
    place.server.freeze()
    errors: list[KVCacheSDKError] = []

    def read(number: int) -> None:
        for _ in range(2):  # on the connection there is, and then waiting for a new one
            try:
                corpus.check(prompts[number % 4], ctx.retrieve(prompts[number % 4]))
            except KVCacheSDKError as error:
                errors.append(error)

    try:
        with in_time(2 * TIMEOUT):
            threads = [threading.Thread(target=read, args=(n,)) for n in range(32)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * TIMEOUT + PATIENCE)
    finally:
        place.server.thaw()
    assert len(errors) == 2 * 32
    for error in errors:
        place.names(error, "retrieve")
    corpus.works_again(ctx)
