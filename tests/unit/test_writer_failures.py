"""KVCacheWriter when something breaks: what was put out is stored if it can be, and every failure is heard."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvdata import Connection
from kvdata.datasets import Manifest
from kvdata.errors import InvalidRequest, PoolFull, StoreFailed
from kvdata.lightning import CacheWrite, KVCacheWriter
from kvdata.lightning.manifest_part import commit
from kvdata.server import EmbeddedServer
from tests.servers import Server
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv
from tests.unit.writes import QUIET, Emits, predict, readable, write, writer_threads

pytestmark = QUIET

CACHE = 64 * LAYOUT.token_bytes
ROOM = 2 * 8192  # a cache's two chunks in a pool's pages of 4 KiB


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_error_in_the_middle_loses_nothing_and_the_next_run_takes_the_part_in(connection, tmp_path, caplog):
    batches = [[write()], [write()], []]
    manifest = tmp_path / "m.jsonl"
    writer = KVCacheWriter(connection, manifest)
    with pytest.raises(RuntimeError, match="the model failed"):
        predict(writer, Emits(batches, fail_at=2))
    assert writer.counts.stored == writer.counts.verified + 1 == 2
    assert all(readable(connection, batch[0]) for batch in batches[:2])
    assert parts(tmp_path) == ["m.jsonl.rank0.part"]
    assert not writer_threads()
    with open(tmp_path / "m.jsonl.rank0.part", "a") as part:
        part.write('{"source": "4')  # what a killed process leaves
    (tmp_path / "m.jsonl.rank7.part").write_bytes(_line(connection, tmp_path) + b'{"sou')  # there were more ranks
    last = write()
    predict(KVCacheWriter(connection, manifest), Emits([batches[0], [last]]))
    found = [e.salt for e in Manifest.load(manifest)]
    assert found[:3] == [batches[0][0].address()[1], batches[1][0].address()[1], last.address()[1]]
    assert len(found) == 4
    assert parts(tmp_path) == ["m.jsonl"]


def _line(connection: Connection, folder: Path) -> bytes:
    """A manifest's line."""
    writer = KVCacheWriter(connection, folder / "line")
    writer.submit(write())
    writer.flush()
    line = (folder / "line").read_bytes()
    (folder / "line").unlink()
    return line


def test_a_failed_store_is_raised_at_the_next_batch_and_the_others_are_stored(connection, tmp_path):
    bad = CacheWrite(random_kv(33), fresh_tokens(64), "keydiff")
    writer = KVCacheWriter(connection)
    good = write()
    begun: list[int] = []

    def wait_until_it_has_failed(index: int) -> None:
        begun.append(index)
        while index and not writer.counts.failed:
            time.sleep(0.01)

    with pytest.raises(StoreFailed, match="not whole chunks of 32"):
        predict(writer, Emits([[bad], [good], [], []], before=wait_until_it_has_failed))
    assert begun == [0, 1]
    assert writer.counts.failed == 1
    with pytest.raises(StoreFailed, match="not whole chunks of 32"):
        predict(writer, Emits([[good, bad]]))  # and at the end of the stage, where there is no next batch
    assert readable(connection, good)


def test_a_server_that_nobody_reaches_never_hides_the_first_error(caplog):
    nobody = Connection("tcp://127.0.0.1:1", "http://127.0.0.1:1", "m", 1.0, LAYOUT)
    with pytest.raises(StoreFailed, match="is the server running"):
        predict(KVCacheWriter(nobody), Emits([[write()]]))
    failing = KVCacheWriter(nobody)
    with pytest.raises(RuntimeError, match="the model failed"), caplog.at_level(logging.ERROR, "kvdata"):
        predict(failing, Emits([[write()], []], fail_at=1))
    assert "while handling RuntimeError: storing compressed caches failed" in caplog.text
    assert failing.counts.failed == 1
    assert not writer_threads()


def test_a_server_that_answers_no_more_is_heard_of_after_one_time_out(tmp_path):
    server = Server("embedded", "pickle", chunk_size=32).start()
    writer = KVCacheWriter(Connection(server.url, server.http_url, "unit/model", 2.0, LAYOUT), tmp_path / "m.jsonl")

    def freeze(index: int) -> None:
        if index == 1:
            while not writer.counts.stored:
                time.sleep(0.01)
            server.freeze()  # and not killed: a refused connection is noticed before the twelve are queued

    try:
        began = time.monotonic()
        with pytest.raises(StoreFailed, match="and 12 more"):
            predict(writer, Emits([[write()], [write() for _ in range(12)]], before=freeze))
        assert time.monotonic() - began < 13 * 2.0  # which one time-out each would take
    finally:
        server.thaw()
        server.stop()
    assert writer.counts.stored == 1
    assert writer.counts.failed == 13  # the first was not there any more to be read back
    assert len((tmp_path / "m.jsonl.rank0.part").read_text().splitlines()) == 1
    assert not writer_threads()


def test_a_server_that_hangs_holds_a_batch_up_for_so_long_and_no_longer(caplog):
    server = Server("embedded", "pickle", chunk_size=32).start()
    connection = Connection(server.url, server.http_url, "unit/model", 2.0, LAYOUT)
    writer = KVCacheWriter(connection, max_pending_bytes=CACHE, drain_seconds=0.5)
    try:
        writer.submit(write())
        while not writer.counts.stored:
            time.sleep(0.01)
        assert writer.counts.wait_seconds == 0
        server.freeze()
        writer.submit(write())
        with pytest.raises(StoreFailed, match="no cache could be stored for"):
            writer.submit(write())
        assert writer.counts.wait_seconds >= 0.5
        with pytest.raises(StoreFailed, match="one cache was still being stored"):
            writer.flush()
        for thread in writer_threads():  # it ends by itself, with the store that it is at
            thread.join(30)
        assert not writer_threads()
    finally:
        server.kill()
        server.stop()


def test_a_full_server_is_told_from_a_dead_one():
    with EmbeddedServer(chunk_size=32, pool_bytes=2 * ROOM, transfer="pickle", watermark=2.0) as small:
        writer = KVCacheWriter(Connection(small.url, small.http_url, "unit/model", 30.0, LAYOUT))
        with pytest.raises(PoolFull, match="Give it more memory"):
            predict(writer, Emits([[write(), write(), write()]]))
        assert (writer.counts.stored, writer.counts.failed) == (2, 1)


def test_what_a_small_server_evicts_is_found_missing():
    with EmbeddedServer(chunk_size=32, pool_bytes=4 * ROOM, transfer="pickle") as small:
        connection = Connection(small.url, small.http_url, "unit/model", 30.0, LAYOUT)
        writer = KVCacheWriter(connection, verify_every=1)
        batches = [[write()] for _ in range(8)]
        with pytest.raises(StoreFailed, match="not all of it where 64 tokens were stored") as raised:
            predict(writer, Emits(batches))
        gone = [batch[0].address()[1] for batch in batches if not readable(connection, batch[0])]
        assert any(salt in str(raised.value) for salt in gone)
        assert writer.counts.stored == 8
        assert 1 <= writer.counts.failed == 8 - writer.counts.verified <= len(gone)


@pytest.mark.parametrize(("overwritten", "said"), [(False, "not all of it"), (True, "other content")])
def test_a_cache_changed_behind_its_back_is_found(connection, overwritten, said):
    first, second = write(), write()
    writer = KVCacheWriter(connection, verify_every=1)

    def meddle(index: int) -> None:
        if index != 1:
            return
        tokens, salt = first.address()
        with connection.connect() as ctx:
            assert ctx.wait_cached(tokens, salt) == 64
            ctx.delete(tokens, salt)
            if overwritten:
                changed = first.kv.clone()
                changed[1, 2, 63, 15] += 1
                ctx.store(changed, tokens, salt)

    with pytest.raises(StoreFailed, match=f"{said} where 64 tokens.*{first.address()[1]}"):
        predict(writer, Emits([[first], [second]], before=meddle))
    assert (writer.counts.stored, writer.counts.verified, writer.counts.failed) == (2, 1, 1)


def interrupted(url: str, http_url: str, manifest: str) -> None:
    """Predicts, says so at the third batch, and stays there: what `test_ctrl_c_...` interrupts."""

    def stay(index: int) -> None:
        if index == 2:
            print("here", flush=True)
            time.sleep(60)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    source = list(range(5_000_000, 5_000_128))
    batches = [[CacheWrite(random_kv(64), source, f"number{number}")] for number in range(2)]
    writer = KVCacheWriter(Connection(url, http_url, "unit/model", 30.0, LAYOUT), manifest)
    predict(writer, Emits([*batches, []], before=stay))


@pytest.mark.timeout(450)
def test_ctrl_c_stores_what_was_put_out(connection, tmp_path):
    code = f"from {__name__} import interrupted; import sys; interrupted(*sys.argv[1:])"
    command = [sys.executable, "-c", code, connection.url, connection.http_url, str(tmp_path / "m.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None
            assert "here\n" in iter(process.stdout.readline, "")
            process.send_signal(signal.SIGINT)
            assert process.wait(200) == 1
        finally:
            process.kill()
    assert parts(tmp_path) == ["m.jsonl.rank0.part"]
    predict(KVCacheWriter(connection, tmp_path / "m.jsonl"), Emits([[write()]]))
    found = Manifest.load(tmp_path / "m.jsonl")
    assert [e.policy for e in found] == ["number0", "number1", "keydiff"]
    with connection.connect() as ctx:
        assert ctx.lookup_many([e.tokens for e in found], [e.salt for e in found]) == [64, 64, 64]


def test_one_run_at_a_time_writes_a_manifest_and_what_is_none_is_refused_at_once(connection, tmp_path):
    manifest = tmp_path / "m.jsonl"
    first, second = KVCacheWriter(connection, manifest), KVCacheWriter(connection, manifest)
    first.submit(write())
    with pytest.raises(StoreFailed, match="another process is writing"):
        second.submit(write())
    first.flush()
    before = manifest.read_text()
    second.submit(write())
    second.flush()
    assert manifest.read_text().startswith(before)
    manifest.write_text("a novel")
    with pytest.raises(InvalidRequest, match="line 1, is not"):
        first.submit(write())
    assert manifest.read_text() == "a novel"
    with pytest.raises(StoreFailed, match="must be a folder that all ranks share"):
        commit(tmp_path / "elsewhere" / "m.jsonl", 100)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed, match="cannot be written"):
        KVCacheWriter(connection, tmp_path / "file" / "m.jsonl").submit(write())
