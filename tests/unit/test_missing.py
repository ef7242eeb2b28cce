"""What a dataset does about prefixes that the server no longer holds, and about a server that fails for a moment."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch

from kvdata import KVCacheDataset, collate
from kvdata.datasets import KVLoader, Refill
from kvdata.datasets.retry import end_retries_with, with_retries
from kvdata.errors import ConnectionLost, InvalidRequest, MissingKV, ServerTimeout, StoreFailed
from tests.unit.conftest import fresh_tokens, random_kv


@pytest.fixture
def prompts(connection) -> list[list[int]]:
    return [fresh_tokens(64) for _ in range(40)]


class Engine:
    """Computes caches that depend on the tokens alone, and counts how often it does."""

    def __init__(self, fails: bool = False) -> None:
        self.prefilled: list[int] = []
        self.fails = fails
        self._lock = threading.Lock()

    def prefill(self, tokens: list[int]) -> torch.Tensor:
        with self._lock:
            self.prefilled.append(tokens[0])
        if self.fails:
            raise StoreFailed("no room")
        return cache_of(tokens)

    def __reduce__(self):
        return Engine, (self.fails,)


def cache_of(tokens: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens[0])
    return torch.randn(2, 3, len(tokens), 16, generator=generator).bfloat16()


def test_skipping_keeps_batches_full_until_too_many_are_missing(connection, prompts, ctx):
    for prompt in prompts[:30]:
        ctx.store(random_kv(64), prompt)
    data = KVCacheDataset(prompts, connection=connection, on_missing="skip", skip_limit=0.4)
    batches = list(KVLoader(data, batch_size=4))
    assert [len(batch) for batch in batches] == [4] * 10
    assert all(len(set(batch.index.tolist())) == 4 for batch in batches)
    assert max(int(batch.index.max()) for batch in batches) == 29
    stats = data.stats()
    assert (stats["skipped"], stats["substituted"], stats["misses"], stats["samples"]) == (10, 10, 10, 40)
    strict = KVCacheDataset(prompts, connection=connection, on_missing="skip", skip_limit=0.1)
    assert len(strict.__getitems__(range(24, 40))) == 16  # 10 are too few to judge
    with pytest.raises(MissingKV, match="20 of 32 samples are missing"):
        strict.__getitems__(range(24, 40))
    data.close()
    strict.close()


def test_substitutes_are_no_longer_than_the_batch_is(connection, ctx):
    lengths = [64, 128, 32, 64]
    prompts = [fresh_tokens(length) for length in lengths]
    for prompt in prompts[1:]:
        ctx.store(random_kv(len(prompt)), prompt)
    data = KVCacheDataset(prompts, connection=connection, on_missing="skip")
    batch = collate(data.__getitems__([0, 2]))
    assert batch.index.tolist() == [3, 2]
    assert batch.kv.shape[3] == 64
    data.close()


def test_an_evicted_prefix_is_computed_again(connection, prompts, ctx):
    for prompt in prompts[:8]:
        ctx.store(cache_of(prompt), prompt)
    ctx.delete(prompts[1])
    ctx.delete(prompts[6])
    engine = Engine()
    data = KVCacheDataset(prompts[:8], connection=connection, on_missing="refill", refill=engine)
    for batch in KVLoader(data, batch_size=4):
        for row, index in enumerate(batch.index.tolist()):
            assert torch.equal(batch.kv[row], cache_of(prompts[index]))
    assert sorted(engine.prefilled) == sorted([prompts[1][0], prompts[6][0]])
    stats = data.stats()
    assert (stats["refilled"], stats["misses"], stats["hits"], stats["samples"]) == (2, 2, 6, 8)
    assert ctx.lookup(prompts[6]) == 64
    copy = pickle.loads(pickle.dumps(data))
    ctx.delete(prompts[6])
    assert torch.equal(copy[6]["kv"], cache_of(prompts[6]))
    data.close()
    copy.close()


def test_a_prefix_is_computed_once_however_many_ask(connection, prompts, ctx):
    engine = Engine()
    refill = Refill(engine)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: refill(ctx, 0, prompts[0], "s"), range(8)))
    assert found == [64] * 8
    assert len(engine.prefilled) == 1


def test_a_serving_engine_stores_by_itself(connection, prompts, ctx):
    asked = []

    def complete(tokens, params, salt):
        asked.append((tokens, params["max_tokens"], salt))
        ctx.store(cache_of(tokens), tokens, salt)
        yield "token"

    data = KVCacheDataset(prompts[:2], connection=connection, cache_salt="x", on_missing="refill", refill=complete)
    assert torch.equal(data[1]["kv"], cache_of(prompts[1]))
    assert asked == [(prompts[1], 1, "x")]
    data.close()


def test_what_cannot_be_computed_again_says_why(connection, prompts):
    data = KVCacheDataset(prompts, connection=connection, on_missing="refill", refill=Engine(fails=True))
    with pytest.raises(MissingKV, match="prefix 3 was missing and could not be computed again: no room"):
        data[3]
    idle = KVCacheDataset(
        prompts, connection=connection, on_missing="refill", refill=Refill(lambda *_: [], settle_seconds=0.0)
    )
    with pytest.raises(MissingKV, match="prefix 4: 0 of 64 tokens are cached"):
        idle[4]
    data.close()
    idle.close()
    for wrong in ({"refill": Engine()}, {"on_missing": "refill"}):
        with pytest.raises(InvalidRequest, match="belong together"):
            KVCacheDataset(prompts, connection=connection, **wrong)


@pytest.fixture
def at_once(monkeypatch):
    for name in ("_LONGEST_WAIT", "_JITTER"):
        monkeypatch.setattr(f"kvdata.datasets.retry.{name}", 0.0)


def test_transient_errors_are_tried_again_and_counted(at_once, connection, prompts, ctx, monkeypatch):
    ctx.store(cache_of(prompts[0]), prompts[0])
    data = KVCacheDataset(prompts, connection=connection, retries=2)
    errors = [ServerTimeout("slow"), ConnectionLost("gone")]

    def flaky(call):
        def maybe(*arguments):
            if errors:
                raise errors.pop()
            return call(*arguments)

        return maybe

    for of, name in ((data.context._sessions, "current"), (data.context, "retrieve_many")):  # also the handshake alone
        monkeypatch.setattr(of, name, flaky(getattr(of, name)))
    assert torch.equal(data[0]["kv"], cache_of(prompts[0]))
    assert data.stats()["retries"] == 2
    errors[:] = [ServerTimeout("slow")] * 3
    with pytest.raises(ServerTimeout, match="slow"):
        data[0]
    with pytest.raises(MissingKV):  # is not transient
        data[1]
    assert data.stats()["retries"] == 4
    data.close()


def test_other_errors_are_not_tried_again(at_once):
    calls = []

    def action():
        calls.append(1)
        raise InvalidRequest("wrong")

    with pytest.raises(InvalidRequest):
        with_retries(action, 5, lambda: None)
    assert len(calls) == 1


class Fails(Engine):
    """At the first times something fails."""

    def __init__(self, left: int, error: Exception) -> None:
        super().__init__()
        self.left, self.error = left, error

    def prefill(self, tokens):
        self.left -= 1
        if self.left >= 0:
            raise self.error
        return super().prefill(tokens)


@pytest.mark.parametrize("error", [ServerTimeout("slow"), ConnectionLost("gone")])
def test_a_refill_that_the_server_does_not_answer_is_tried_again_and_counted_once(
    at_once, connection, prompts, ctx, error
):
    ctx.store(cache_of(prompts[0]), prompts[0])
    engine = Fails(2, error)
    options = {"connection": connection, "on_missing": "refill", "refill": engine}
    data = KVCacheDataset(prompts, **options, retries=2)
    found = data.__getitems__([0, 1])
    assert [torch.equal(found[i]["kv"], cache_of(prompts[i])) for i in (0, 1)] == [True, True]
    stats = data.stats()
    assert (stats["hits"], stats["misses"], stats["refilled"], stats["samples"], stats["retries"]) == (1, 1, 1, 2, 2)
    assert stats["bytes"] == sum(sample["kv"].nbytes for sample in found)
    engine.left = 3
    with pytest.raises(type(error), match=f"prefix 2 was missing and could not be computed again: {error}"):
        data[2]
    assert data.stats()["misses"] == 1
    data.close()


def test_what_was_computed_again_and_is_gone_before_it_is_read_is_computed_once_more(at_once, connection, prompts, ctx):
    engine = Engine()
    data = KVCacheDataset(prompts, connection=connection, on_missing="refill", refill=engine, retries=1)
    refill = data.refill

    def evicted_after_the_first(context, index, tokens, salt):
        refill(context, index, tokens, salt)
        if len(engine.prefilled) == 1:
            ctx.delete(tokens)

    data.refill = evicted_after_the_first
    assert torch.equal(data[0]["kv"], cache_of(prompts[0]))
    stats = data.stats()
    assert (stats["misses"], stats["refilled"], stats["retries"], stats["samples"]) == (1, 1, 1, 1)
    assert len(engine.prefilled) == 2
    data.close()


class NotedWaits(threading.Event):
    """An event for which nobody really waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout=None):
        self.seconds.append(timeout)
        return self.is_set()


def failing():
    raise ServerTimeout("slow")


def waits(retries: int, seconds: float | None = None) -> list[float]:
    """Seconds between the tries of what always fails."""
    noted = NotedWaits()

    def run() -> None:
        end_retries_with(noted)
        with pytest.raises(ServerTimeout):
            with_retries(failing, retries, lambda: None, seconds=seconds)

    copy_context().run(run)
    return noted.seconds


def test_tries_are_so_far_apart_that_a_restart_fits_in_between():
    for least, found in zip((1, 2, 4, 8, 8), waits(5), strict=True):
        assert least <= found <= least + 1
    assert len(waits(5, seconds=3.5)) == 2  # the wait of 4 s would be longer


def test_a_loader_that_is_left_does_not_wait_for_its_servers_return(connection, prompts, ctx, monkeypatch):
    monkeypatch.setattr("kvdata.datasets.retry._FIRST_WAIT", 60.0)
    monkeypatch.setattr("kvdata.datasets.retry._LONGEST_WAIT", 60.0)
    ctx.store(cache_of(prompts[0]), prompts[0])
    data = AwayAfterOne(prompts, connection=connection, retries=1)
    batches = iter(KVLoader(data, batch_size=1))
    assert next(batches).index.tolist() == [0]
    deadline = time.monotonic() + 20
    while data.stats()["retries"] < 2:  # both threads wait to try again
        assert time.monotonic() < deadline
        time.sleep(0.01)
    started = time.monotonic()
    batches.close()
    assert time.monotonic() - started < 30
    data.close()


class AwayAfterOne(KVCacheDataset):
    """Its server goes away after the first sample."""

    def _samples(self, indices, *arguments):
        if indices != [0]:
            raise ConnectionLost("gone")
        return super()._samples(indices, *arguments)


def test_a_connection_is_tried_again_too(at_once, connection, prompts, monkeypatch):
    data = KVCacheDataset(prompts, connection=connection, retries=1)
    opened, errors = data.context.open, [ConnectionLost("gone")]

    def flaky():
        if errors:
            raise errors.pop()
        return opened()

    monkeypatch.setattr(data.context, "open", flaky)
    data.open()
    assert data.context.chunk_size == 32
    assert data.stats()["retries"] == 1
    data.close()
