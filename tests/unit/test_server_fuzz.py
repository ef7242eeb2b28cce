"""The embedded server under any bytes on its sockets: it lives, holds nothing afterwards, and keeps to this machine."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdata.cli.servers import serve
from kvdata.errors import ServerError
from kvdata.server import EmbeddedServer
from kvdata.server.dispatch import FRAME_BYTES, Dispatcher
from kvdata.server.service import Service
from kvdata.wire.shm import POOL_PREFIX, SHM_FOLDER
from tests.unit import hostile
from tests.unit.test_server_wire import (
    CHUNK,
    NUMBERS,
    SILENCE,
    Clock,
    Raw,
    encode,
    key,
    new_tokens,
    payload,
    registration,
    small_server,
    store,
)

LONGER_THAN_ANY_TTL = 10_000.0
EXAMPLES = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def server(clock: Clock) -> Iterator[EmbeddedServer]:
    with small_server(clock, "-fuzz") as running:
        yield running


@pytest.fixture(scope="module")
def raw(server: EmbeddedServer) -> Iterator[Raw]:
    client = Raw(server.url)
    yield client
    client.close()


def check_serves(server: EmbeddedServer, raw: Raw) -> None:
    """A whole store and retrieve, and the server's HTTP."""
    tokens = new_tokens(2)
    raw.call("register", registration())
    store(raw, tokens)
    assert raw.lookup(tokens, "r") == 2
    assert raw.call("prepare_retrieve", key(tokens, "r"), 1)["success"] is True
    assert raw.call("commit_retrieve", key(tokens, "r"), 1) is True
    assert raw.call("end", "r") is None
    raw.call("unregister", 1)
    assert httpx.get(server.http_url + "/healthcheck").json() == {"status": "healthy"}


def check_holds_nothing(server: EmbeddedServer, raw: Raw, clock: Clock) -> None:
    """Whatever was opened is gone with the server's time-outs, but for finished chunks, which `clear` removes."""
    clock.now += LONGER_THAN_ANY_TTL
    raw.call("clear", False)
    deadline = threading.Event()
    status: dict[str, Any] = {}
    for _ in range(200):  # its clean-up is due once a second
        status = httpx.get(server.http_url + "/status").json()
        held = status["storage_manager"]["l1_manager"]
        if not (status["active_sessions"] or status["registered_non_cuda_instance_ids"] or held["total_object_count"]):
            break
        deadline.wait(0.05)
        raw.call("clear", False)
    assert (status["active_sessions"], status["registered_non_cuda_instance_ids"]) == (0, [])
    assert held["total_object_count"] == held["read_locked_count"] == held["memory_used_bytes"] == 0


@pytest.fixture(autouse=True, scope="module")
def lives_and_holds_nothing(server: EmbeddedServer, raw: Raw, clock: Clock) -> Iterator[None]:
    yield
    check_serves(server, raw)
    check_holds_nothing(server, raw, clock)


# --- ZMQ

INTEGERS = st.one_of(
    st.integers(-3, 3), st.sampled_from([CHUNK, 2 * CHUNK, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 2**64 - 1])
)
WORDS = st.one_of(
    st.sampled_from(["", "model", "r", "bfloat16", "uint8", "qint8", "float4_e2m1fn_x2", "../x", "@"]),
    st.text(max_size=8),
)
TOKENS = st.one_of(st.sampled_from([[], list(range(CHUNK)), list(range(3 * CHUNK))]), st.lists(INTEGERS, max_size=20))
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), WORDS, st.binary(max_size=30), TOKENS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=8,
)
KEYS = st.fixed_dictionaries(
    {},
    optional={
        "model_name": WORDS, "world_size": INTEGERS, "worker_id": st.one_of(st.none(), INTEGERS), "token_ids": TOKENS,
        "start": INTEGERS, "end": INTEGERS, "request_id": WORDS, "cache_salt": WORDS, "num_kv_readers": INTEGERS,
    },
).map(lambda fields: key(list(range(2 * CHUNK)), "r", **fields))  # fmt: skip
REGISTRATIONS = st.fixed_dictionaries(
    {},
    optional={
        "instance_id": INTEGERS, "model_name": WORDS, "world_size": INTEGERS, "num_layers": INTEGERS,
        "hidden_dim_size": INTEGERS, "dtype_str": WORDS, "use_mla": st.booleans(), "num_physical_slots": INTEGERS,
        "num_kv_heads": INTEGERS, "head_dim": INTEGERS, "packing": WORDS, "block_size": INTEGERS,
    },
).map(lambda fields: registration(**fields))  # fmt: skip
PAYLOADS = st.one_of(
    st.just(b""), st.just(payload(2)), st.sampled_from(list(hostile.CORPUS.values())), st.binary(max_size=50)
)
ARGUMENTS = st.one_of(KEYS, REGISTRATIONS, PAYLOADS, INTEGERS, WORDS, ANYTHING)
WELL_FORMED = st.one_of(
    st.tuples(st.just("lookup"), KEYS, st.just(1)),
    st.tuples(st.just("free"), KEYS, st.just(1)),
    st.tuples(st.just("register"), REGISTRATIONS),
    st.tuples(st.sampled_from(["unregister", "ping"]), INTEGERS),
    st.tuples(st.sampled_from(["prepare_store", "prepare_retrieve", "commit_retrieve"]), KEYS, st.just(1)),
    st.tuples(st.just("commit_store"), KEYS, st.just(1), PAYLOADS),
    st.tuples(st.sampled_from(["query", "end"]), WORDS),
    st.tuples(st.just("clear"), st.booleans()),
)
ANY_CALL = st.tuples(st.sampled_from(sorted(NUMBERS))).flatmap(
    lambda name: st.lists(ARGUMENTS, max_size=4).map(lambda arguments: (*name, *arguments))
)


@given(st.lists(st.one_of(WELL_FORMED, ANY_CALL), max_size=8))
@EXAMPLES
def test_any_calls_in_any_order(server, raw, calls):
    hostile.tripped.clear()
    raw.call("register", registration())
    for name, *arguments in calls:
        raw.call(name, *arguments)
    assert raw.call("noop") == "OK"
    assert not hostile.tripped


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=6))
@EXAMPLES
def test_any_frames(raw, frames):
    raw.exchange(*frames)


@given(WELL_FORMED, st.data())
@EXAMPLES
def test_calls_with_bytes_changed(raw, call, data):
    name, *arguments = call
    frames = [b"u", encode(NUMBERS[name]), *map(encode, arguments)]
    place = data.draw(st.integers(1, len(frames) - 1))
    start = data.draw(st.integers(0, len(frames[place])))
    length, piece = data.draw(st.integers(0, 9)), data.draw(st.binary(max_size=9))
    frames[place] = frames[place][:start] + piece + frames[place][start + length :]
    raw.exchange(*frames)


@given(st.sampled_from(["\xff\0\0\0\0\0\0\0\x01\x7f\x03", "GET / HTTP/1.0\r\n\r\n", ""]), st.binary(max_size=200))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_no_zmq_at_all(server, raw, greeting, noise):
    for port in (server.port, server.http_port):
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(greeting.encode("latin-1") + noise)
    assert raw.call("noop") == "OK"


def test_a_frame_that_claims_to_be_huge_ends_its_own_connection_only(server, raw):
    """The handshake of a DEALER, and a frame whose memory would be taken before its first byte comes."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(16 + 32)
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
        connection.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        connection.sendall(b"\x02" + (FRAME_BYTES + 1).to_bytes(8, "big"))
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):  # until the server hangs up; waiting for more bytes, it would not
                pass
    assert raw.call("noop") == "OK"


# --- HTTP

PATHS = [
    "/cache/clear",
    "/cache/objects",
    "/status",
    "/config",
    "/metrics",
    "/",
    "/%2e%2e/etc",
    "/cache/objects/../../x",
]
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.sampled_from(["keys", "tier", "force", "kv_rank"]), st.text(max_size=4)), inner, max_size=4
        ),
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def http(server: EmbeddedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http_url) as client:
        yield client


@given(
    st.sampled_from(PATHS),
    st.sampled_from(["GET", "POST", "DELETE", "PUT", "OPTIONS", "X"]),
    st.one_of(st.binary(max_size=100), JSON),
)
@EXAMPLES
def test_any_request(http, path, method, body):
    content = body if isinstance(body, bytes) else msgspec.json.encode(_finite(body))
    assert http.request(method, path, content=content).status_code < 500 or path == "/cache/objects"
    assert http.get("/healthcheck").json() == {"status": "healthy"}


def _finite(value: Any) -> Any:
    return value if not isinstance(value, float) or abs(value) < 1e300 else 0.5


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_body_nested_ten_thousand_deep_is_refused(http, method):
    path = "/cache/clear" if method == "POST" else "/cache/objects"
    assert http.request(method, path, content=b'{"x":' + b"[" * 100_000).status_code == 422


def test_a_body_is_not_kept_beyond_its_limit(http, monkeypatch):
    monkeypatch.setattr("kvdata.server.web.BODY_BYTES", 1 << 20)
    body = b'{"tier": "l1"}' + b" " * (2 << 20)
    assert http.post("/cache/clear", content=iter([body])).status_code == 413
    assert http.request("DELETE", "/cache/objects", content=body).status_code == 413
    assert http.post("/cache/clear", content=body[: 1 << 20]).status_code == 200


# --- what stays, and where it can be reached


@pytest.fixture
def service() -> Service:
    from kvdata.server.pool import Pool
    from kvdata.server.store import ChunkStore

    pool = Pool(torch.empty(1 << 20, dtype=torch.uint8))
    clock = Clock()
    return Service(ChunkStore(pool, clock, 600.0, 300.0, 0.8, 0.2), CHUNK, "pool", 600.0)


def test_nothing_is_kept_of_stores_and_reads_that_never_end(service):
    """Each names its whole prompt: a client that gives up now and then would fill the server's memory."""
    dispatcher = Dispatcher(service)

    def call(name: str, *arguments: object) -> list[bytes] | None:
        return dispatcher.answer([b"u", encode(NUMBERS[name]), *map(encode, arguments)])

    call("register", registration())
    committed, aborted = new_tokens(1), new_tokens(1)
    call("prepare_store", key(committed), 1)
    call("commit_store", key(committed), 1, b"")
    call("lookup", key(committed, "r", worker_id=None), 1)
    call("prepare_retrieve", key(committed, "r"), 1)
    call("prepare_store", key(aborted), 1)
    assert (len(service._stores), len(service._reads)) == (1, 1)
    service.store.clock.now += 301  # the read locks have ended
    service.tick()
    assert (len(service._stores), len(service._reads)) == (1, 0)
    service.store.clock.now += 900  # and the reservation, long ago
    service.tick()
    assert (len(service._stores), len(service._reads)) == (0, 0)


@pytest.mark.parametrize(("host", "reached"), [(None, False), ("0.0.0.0", True)])
def test_only_this_machine_reaches_it_unless_it_is_told_otherwise(host, reached):
    """Every address of 127/8 is this machine's, and stands for the network here: only one is listened on."""
    with EmbeddedServer(pool_bytes=1 << 20, **({"host": host} if host else {})) as server:
        for port in (server.port, server.http_port):
            with socket.socket() as client:
                client.settimeout(5)
                assert (client.connect_ex(("127.0.0.2", port)) == 0) is reached
    assert inspect.signature(serve).parameters["host"].default == "127.0.0.1"


def test_its_pool_is_private_whatever_the_umask():
    before = os.umask(0)
    try:
        with EmbeddedServer(pool_bytes=1 << 20) as server:
            assert (SHM_FOLDER / server.shm_name).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_a_link_in_the_place_of_a_pool_is_not_followed(tmp_path):
    link, target = SHM_FOLDER / f"{POOL_PREFIX}kvdata-link-{os.getpid()}", tmp_path / "precious"
    target.write_bytes(b"")
    link.symlink_to(target)
    try:
        with pytest.raises(ServerError, match="in use"):
            EmbeddedServer(pool_bytes=1 << 20, shm_name=link.name).start()
        assert target.read_bytes() == b""
    finally:
        link.unlink()


def test_its_log_repeats_neither_what_a_client_sent_nor_lines_of_it(server, raw, caplog):
    secret = [2**32 + 4711] * CHUNK  # no token id, but it could have been one
    long = "\nWARNING forged" + "x" * 5000
    with caplog.at_level(logging.WARNING, "kvdata.server"):
        raw.call("register", registration())
        for operation in ("prepare_store", "prepare_retrieve"):
            assert raw.call(operation, key(secret), 1) == SILENCE
        assert raw.call("commit_store", key(list(range(CHUNK))), 1, hostile.CORPUS["os.system"]) == SILENCE
        assert raw.call("prepare_store", key(list(range(CHUNK)), model_name=f"{long}@"), 1) == SILENCE
        assert raw.call("register", registration(7, dtype_str=long)) == SILENCE
        raw.call("register", registration(8, model_name=long, num_kv_heads=1, head_dim=1, packing=long))
    assert len(caplog.messages) >= 6
    assert not [line for line in caplog.messages if str(secret[0]) in line or len(line) > 500 or "\n" in line]
