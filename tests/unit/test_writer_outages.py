"""KVCacheWriter(retries=...) and a server that is away for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from kvdata import Connection
from kvdata.datasets import Manifest
from kvdata.errors import ConnectionLost, InvalidRequest, StoreFailed
from kvdata.lightning import KVCacheWriter, WriteCounts
from kvdata.lightning.cache_store import CacheStore
from kvdata.lightning.kept import Kept
from kvdata.lightning.writing_thread import WritingThread
from kvdata.server import EmbeddedServer
from tests.servers import Server
from tests.unit.conftest import LAYOUT
from tests.unit.writes import QUIET, Emits, Trains, predict, readable, trainer, write, writer_threads

pytestmark = QUIET

CACHE = 64 * LAYOUT.token_bytes


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between tries for tests: a tenth of a second, .. half of one."""
    for name, seconds in (("_FIRST_WAIT", 0.1), ("_JITTER", 0.1), ("_LONGEST_WAIT", 0.5)):
        monkeypatch.setattr(f"kvdata.datasets.retry.{name}", seconds)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A process, to be killed and frozen."""
    running = Server("embedded", getattr(request, "param", "pickle"), chunk_size=32).start()
    yield running
    running.stop()


def connection_to(server: Server, timeout: float = 20.0) -> Connection:
    return Connection(server.url, server.http_url, "unit/model", timeout, LAYOUT)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def down_until_missed(server: Server, writer: KVCacheWriter) -> Callable[[int], None]:
    """At step 2, when the two caches before are stored: kill the server, and start it when a store has failed."""

    def start() -> None:
        until(lambda: writer.counts.retries > 0)
        server.start()

    def before(index: int) -> None:
        if index == 2:
            until(lambda: writer.counts.stored == 2)
            server.kill()
            threading.Thread(target=start, name="start").start()

    return before


def test_an_epoch_goes_on_over_a_restart_and_what_was_stored_before_is_stored_again(server, tmp_path):
    connection, batches = connection_to(server), [[write()] for _ in range(4)]
    writer = KVCacheWriter(connection, tmp_path / "m.jsonl", ["train"], verify_every=0, retries=200)
    module = Trains(batches, [])
    before = down_until_missed(server, writer)
    module.on_train_batch_start = lambda batch, index: before(index)
    trainer(writer, max_epochs=1).fit(module, torch.utils.data.DataLoader(range(4)))
    counts = writer.counts
    assert (counts.stored, counts.restored, counts.failed) == (4, 2, 0)
    assert counts.retries > 0
    assert all(readable(connection, one) for (one,) in batches)
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert len(lines) == len(Manifest.load(tmp_path / "m.jsonl")) == 4
    assert not writer_threads()


@pytest.fixture
def restarting() -> Iterator[EmbeddedServer]:
    """A server of this test's own, which it stops and starts; its ports stay."""
    with EmbeddedServer(chunk_size=32, pool_bytes=16 << 20) as server:
        yield server


def restart(server: EmbeddedServer) -> None:
    server.stop()
    server.start()


def test_what_a_restart_has_lost_and_nobody_has_any_more_is_said(restarting):
    connection = Connection(restarting.url, restarting.http_url, "unit/model", 20.0, LAYOUT)
    batches = [[write()] for _ in range(4)]
    writer = KVCacheWriter(connection, max_pending_bytes=CACHE, verify_every=1, retries=200)

    def before(index: int) -> None:
        if index == 2:
            until(lambda: writer.counts.stored == 2)
            restart(restarting)

    with pytest.raises(StoreFailed, match=r"lost 1 caches .* max_pending_bytes="):
        predict(writer, Emits([*batches, []], before=before))
    assert (writer.counts.restored, writer.counts.failed) == (1, 1)
    assert [readable(connection, one) for (one,) in batches] == [False, True, True, True]


@pytest.mark.parametrize("server", ["pickle", "shm"], indirect=True)
def test_a_store_of_unknown_outcome_is_done_once(server, tmp_path):
    """The server stands still when the cache is sent, and does what it finds in its sockets when it goes on."""
    connection = connection_to(server, 1.0)
    writer = KVCacheWriter(connection, tmp_path / "m.jsonl", retries=200)
    first, second = write(), write()
    writer.submit(first)
    until(lambda: writer.counts.stored == 1)
    server.freeze()
    writer.submit(second)
    try:
        until(lambda: writer.counts.retries > 0)
    finally:
        server.thaw()
    writer.flush()
    assert writer.counts.stored + writer.counts.deduplicated == 2
    assert writer.counts.failed == 0
    assert readable(connection, second)
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2
    assert server.memory()["write_locked_count"] == 0


def test_the_end_of_the_time_allowed_ends_the_retries(caplog):
    nobody = Connection("tcp://127.0.0.1:1", "http://127.0.0.1:1", "m", 1.0, LAYOUT)
    writer = KVCacheWriter(nobody, drain_seconds=1.5, retries=100_000)
    writer.submit(write())
    with pytest.raises(StoreFailed, match=r"is the server (alive|running)"):
        writer.flush()
    for thread in writer_threads():
        thread.join(20)
    assert not writer_threads()
    assert 0 < writer.counts.retries < 100
    with pytest.raises(InvalidRequest, match="retries at least 0"):
        KVCacheWriter(nobody, retries=-1)


def test_a_thread_that_is_closed_tries_nothing_again():
    nobody, counts = Connection("tcp://127.0.0.1:1", "http://127.0.0.1:1", "m", 1.0, LAYOUT), WriteCounts()
    thread = WritingThread(nobody, None, counts, CACHE, 0, retries=100_000, retry_seconds=1000.0)
    thread.put(write(), 10.0)
    until(lambda: counts.retries > 0)
    thread.settle(0.1)
    thread.close(20.0)
    assert not writer_threads()
    assert isinstance(thread.failure(), StoreFailed)


def test_what_a_restart_takes_before_it_is_read_back_is_stored_again_then(restarting):
    connection, counts = Connection(restarting.url, restarting.http_url, "m", 20.0, LAYOUT), WriteCounts()
    written = write()
    with connection.connect() as ctx:
        store = CacheStore(ctx, None, counts, 1, Kept(CACHE))
        store.store(written)
        restart(restarting)
        store.verify(*next(store.samples()))
    assert (counts.restored, counts.verified) == (1, 1)
    assert readable(connection, written)


def test_a_server_that_goes_away_again_does_not_hide_what_is_lost(restarting, monkeypatch):
    connection, counts = Connection(restarting.url, restarting.http_url, "m", 20.0, LAYOUT), WriteCounts()
    with connection.connect() as ctx:
        store = CacheStore(ctx, None, counts, 1, Kept(CACHE))
        for written in (write(), write()):
            store.store(written)
        restart(restarting)
        with monkeypatch.context() as away:
            away.setattr(ctx, "store", goes_away)
            with pytest.raises(ConnectionLost):
                store.restore()
        with pytest.raises(StoreFailed, match="lost 1 caches"):
            store.restore()
    assert (counts.restored, counts.failed) == (1, 1)
    assert len(list(store.samples())) == 1
    assert readable(connection, written)


def goes_away(*_: object) -> None:
    raise ConnectionLost("gone")


def test_the_last_caches_are_kept_and_the_addresses_of_all():
    kept, whole = Kept(100), torch.arange(400, dtype=torch.uint8)
    for number in range(4):
        kept.add(((number,), "s"), whole[40 * number : 40 * number + 40])
    kept.add(((3,), "s"), whole[120:160])  # again
    gone = kept.gone(lambda tokens, salts: [0, 1, 0, 0])
    assert {tokens: cache is None for (tokens, _), cache in gone.items()} == {(0,): True, (2,): False, (3,): False}
    assert gone[(3,), "s"].untyped_storage().nbytes() == 40
