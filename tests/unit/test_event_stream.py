"""The subscription to KV events, over real sockets: each way in which a stream can break off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvdata import Connection
from kvdata.client.events import KVEventStream
from kvdata.errors import InvalidRequest, ProtocolError, ServerTimeout, ServerUnreachable, UnsupportedServer
from kvdata.server import EmbeddedServer
from kvdata.wire.messages import KVEvent
from tests.unit.conftest import fresh_tokens
from tests.unit.fake_events import EventServer

SHORT = 1.5  # seconds: of a connection whose timeout is waited for


@pytest.fixture
def server(embedded: EmbeddedServer) -> Iterator[EventServer]:
    running = EventServer(embedded)
    yield running
    running.stop()


def where(server: EventServer | EmbeddedServer, timeout: float = 30.0) -> Connection:
    return Connection(server.url, server.http_url, "unit/model", timeout)


def events_of(stream: KVEventStream, count: int) -> list[KVEvent]:
    """The next events, which must come."""
    found: list[KVEvent] = []
    while len(found) < count:
        batch = stream.poll(30.0)
        assert batch is not None
        found += batch.events
    return found


def test_the_log_comes_first_and_then_what_happens(server):
    before, after = fresh_tokens(64), fresh_tokens(96)
    server.store(before)
    with KVEventStream(where(server)) as stream:
        first = events_of(stream, 2)
        assert [event.token_ids for event in first] == [before[:32], before[32:]]
        assert [event.kind for event in first] == ["stored", "stored"]
        assert first[1].parent_block_hash == first[0].block_hashes[0]
        assert stream.poll(0.0) is None
        server.store(after)
        assert [t for event in events_of(stream, 3) for t in event.token_ids] == after
    server.until(lambda: server.cancels == 1)
    assert server.cursors == [0]


def test_many_batches_are_acknowledged_one_by_one(server):
    with KVEventStream(where(server)) as stream:
        found = []
        for _ in range(20):
            server.store(fresh_tokens(32))
            found += events_of(stream, 1)
    assert [event.seq for event in found] == list(range(1, 21))


def test_a_lost_marker_is_handed_on(server):
    server.store(fresh_tokens(96))
    server.lost_before = 2
    with KVEventStream(where(server)) as stream:
        batch = stream.poll(30.0)
        assert batch is not None
        assert (batch.lost, [event.seq for event in batch.events]) == (True, [3])


def test_a_subscriber_that_the_server_dropped_subscribes_again_where_it_was(server):
    with KVEventStream(where(server)) as stream:
        server.store(fresh_tokens(64))
        events_of(stream, 2)
        server.end_streams()
        server.store(fresh_tokens(32))
        assert [event.seq for event in events_of(stream, 1)] == [3]
    assert server.cursors == [0, 2]


def test_after_a_restart_it_begins_again_at_the_new_log(server):
    with KVEventStream(where(server)) as stream:
        server.store(fresh_tokens(64))
        first = stream.poll(30.0)
        assert first is not None
        events_of(stream, 2 - len(first.events))
        server.restart()
        tokens = fresh_tokens(96)
        server.store(tokens)
        found = []
        while len(found) < 3:
            batch = stream.poll(30.0)
            assert batch is not None
            assert (batch.incarnation, batch.lost) == (2, False)
            found += batch.events
        assert [t for event in found for t in event.token_ids] == tokens
    assert server.cursors == [0, 2, 0]


def test_an_idle_subscriber_pings(server):
    server.reap_seconds = 0.03
    with KVEventStream(where(server)) as stream:
        assert stream.poll(30.0) is not None
        while server.pings < 3:
            assert stream.poll(0.05) is None
        server.store(fresh_tokens(32))
        assert len(events_of(stream, 1)) == 1
    assert server.cursors == [0]


def test_a_server_that_hangs_is_noticed(server):
    server.reap_seconds = 0.03
    server.answers_pings = False
    with KVEventStream(where(server, SHORT)) as stream:
        assert stream.poll(30.0) is not None
        batch = stream.poll(60.0)  # it did answer the new subscription
        assert batch is not None
        assert server.cursors == [0, 0]
        server.answers_subscriptions = False
        with pytest.raises(ServerTimeout, match=r"subscribe_kv_events: no answer"):
            stream.poll(60.0)


def test_a_busy_subscriber_takes_no_late_look_for_a_hang(server):
    """The answer to its last ping lay unread for longer than the timeout."""
    server.reap_seconds = 0.03
    server.answers_pings = False
    with KVEventStream(where(server, SHORT)) as stream:
        assert stream.poll(30.0) is not None
        while not server.pings:
            assert stream.poll(0.02) is None
        server.answers_pings = True
        time.sleep(1.5 * SHORT)
        assert stream.poll(0.02) is None
        server.store(fresh_tokens(32))
        assert len(events_of(stream, 1)) == 1
    assert server.cursors == [0]


def test_a_server_that_went_away_for_good_is_unreachable(server):
    with KVEventStream(where(server, SHORT)) as stream:
        assert stream.poll(30.0) is not None
        server.stop()
        with pytest.raises(ServerUnreachable):
            stream.poll(60.0)


def test_a_closed_stream_says_so(server):
    stream = KVEventStream(where(server))
    stream.close()
    stream.close()
    with pytest.raises(InvalidRequest, match="closed"):
        stream.poll(0.0)


def test_nobody_there_is_unreachable(server):
    nowhere = Connection("tcp://127.0.0.1:1", server.http_url, "unit/model", SHORT)
    with pytest.raises(ServerUnreachable, match="--port"):
        KVEventStream(nowhere)
    with pytest.raises(InvalidRequest, match="ZMQ URL"):
        KVEventStream(Connection("tcp://nonsense", server.http_url, "unit/model", SHORT))


def test_the_embedded_server_has_no_stream_and_says_so_at_once(embedded):
    with pytest.raises(UnsupportedServer, match=r"embedded server has none.*LMCache's own server, 0\.5\.6"):
        KVEventStream(where(embedded))


def _old(path: str, answer: Any) -> Any:
    return "0.5.5" if path == "/lmc_version" else answer


def _disabled(path: str, answer: Any) -> Any:
    return {**answer, "kv_events": {"enabled": False}} if path == "/status" else answer


def _other_hash(path: str, answer: Any) -> Any:
    return {"mp": {**answer["mp"], "hash_algorithm": "builtin"}} if path == "/config" else answer


def _odd(path: str, answer: Any) -> Any:
    return {**answer, "kv_events": {}} if path == "/status" else answer


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (_old, UnsupportedServer, r"runs LMCache 0\.5\.5.*came with 0\.5\.6"),
        (_disabled, UnsupportedServer, "--kv-event-log-size"),
        (_other_hash, UnsupportedServer, "--hash-algorithm blake3"),
        (_odd, ProtocolError, "KV events"),
    ],
)
def test_a_server_without_events_is_refused_and_never_asked_for_them(server, change, error, match):
    server.http = change
    with pytest.raises(error, match=match):
        KVEventStream(where(server))
    assert server.cursors == []
