"""HTTP that answers nonsense, a page, an error, nothing, megabytes, or for ever."""

from __future__ import annotations

import json
import time

import msgspec
import pytest

from kvdata.errors import KVCacheSDKError, ProtocolError, ServerError
from tests.faults.checks import TIMEOUT, in_time, resources
from tests.faults.proxy import answered
from tests.faults.web import endless, raw, said

ANSWERS = {
    "html": said(b"<html><body>It works!</body></html>", kind="text/html"),
    "500": said(b"Internal Server Error", 500, "text/plain"),
    "500 in JSON": said(b'"0.5.6"', 500),
    "302": raw(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
    "nothing": raw(b""),
    "empty body": said(b""),
    "null": said(b"null"),
    "list": said(b"[1, 2, 3]"),
    "nested": said(b"[" * 200_000),
    "not http": raw(b"220 mail.example.org ESMTP\r\n"),
    "not utf-8": said(b"\xff\xfe\x00"),
    "bad gzip": raw(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd"),
    "half": raw(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"mp": '),
    "megabytes": said(b" " * (20 << 20)),
    "silence": endless(b"", 60.0),
    "drip": endless(b" ", 0.1),
    "dripping head": lambda request: drip_head(request),
    "flood": endless(b" " * (1 << 20), 0.0),
}
NONSENSE = {
    "/config": [{}, {"mp": None}, {"mp": {"chunk_size": 0}}, {"mp": {"chunk_size": -64}}, {"mp": {"chunk_size": "x"}}],
    "/status": [
        {"cache_context_meta": {"1": {"model_name": "tests/faults"}}},
        {"cache_context_meta": {"1": {"model_name": "tests/faults", "world_size": -1, "kv_cache_layout": {}}}},
        {"non_cuda_context_meta": {"no number": {"model_name": "m"}}},
        {"kvdata_layouts": {"tests/faults": {"num_layers": "many"}}},
        {"storage_manager": {"l1_manager": {"write_ttl_seconds": "long"}}},
    ],
    "/lmc_version": ["", "latest", 5, {"version": "0.5.6"}],
}


def drip_head(request) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not request.closing.wait(0.1):
        request.wfile.write(b"x")


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_handshake_with_something_else(place, answer):
    """Typed, in time, and nothing is left of the attempt."""
    place.web.answer("*", ANSWERS[answer])
    with in_time(), pytest.raises(ServerError) as caught:
        place.connection(TIMEOUT).connect()
    place.names(caught.value, "connect")
    assert ("more than 16 MiB" in str(caught.value)) == (answer in ("megabytes", "flood"))
    assert ("answered 500" in str(caught.value)) == answer.startswith("500")


@pytest.mark.long
def test_a_handshake_whose_every_answer_is_slow(place):
    """The time-out is the whole handshake's, not each request's."""
    version, seconds = json.dumps("0.5.6").encode(), 6.0

    def slow(request) -> None:
        request.closing.wait(0.7 * seconds)
        said(version if request.path == "/lmc_version" else b'{"mp": {"chunk_size": 64}}')(request)

    place.web.answer("*", slow)
    started = time.monotonic()
    with pytest.raises(ServerError) as caught:
        place.connection(seconds).connect()
    assert time.monotonic() - started < 1.3 * seconds
    place.names(caught.value, "connect")


@pytest.mark.parametrize(("path", "answer"), [(path, a) for path, answers in NONSENSE.items() for a in answers])
def test_a_handshake_with_a_server_that_talks_nonsense(place, path, answer):
    place.web.answer(path, said(json.dumps(answer).encode()))
    said_so = ""
    with in_time():
        try:
            place.connection(TIMEOUT).connect().close()
        except KVCacheSDKError as error:
            said_so = str(error)
    # What is harmless in it may be passed over.
    assert not said_so or place.web.url in said_so or "tests/faults" in said_so


@pytest.mark.parametrize("size", [0, -64])
def test_a_chunk_size_that_cannot_be(place, size):
    """Whoever believes it divides by it."""
    place.web.answer("/config", said(json.dumps({"mp": {"chunk_size": size}}).encode()))
    place.proxy.replies("get_chunk_size", answered(msgspec.msgpack.encode(size)))
    with pytest.raises(ProtocolError) as caught:
        place.connect()
    place.names(caught.value, "connect")


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("500", "silence", "drip", "megabytes")]


@pytest.mark.parametrize("answer", ["html", "nothing", *LONG])
def test_the_http_side_fails_under_an_open_context(place, corpus, answer):
    """Hits need no HTTP; a miss cannot be told from a forgotten model without it, and says so."""
    ctx = place.connect()
    there = corpus.stored(ctx)
    tokens, kv = corpus.fresh()
    place.web.answer("*", ANSWERS[answer])
    before = resources()
    assert corpus.check(there, ctx.retrieve(there))
    with in_time(), pytest.raises(ServerError) as caught:
        ctx.retrieve(tokens)
    place.names(caught.value, "retrieve")
    with in_time(), pytest.raises(ServerError) as caught:
        ctx.delete(there)
    place.names(caught.value, "delete")
    assert ctx.store(kv, tokens) is True
    assert resources()["threads"] <= before["threads"] + 3  # of the proxy's own connections
    place.heal()
    corpus.works_again(ctx)
