"""`openai_completion` over connections that do not come about, or break: what is tried again, and what is said."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from kvdata.engines.openai import openai_completion
from kvdata.errors import ConnectionLost, ProtocolError, ServerError, ServerTimeout, ServerUnreachable
from kvdata.sdk.stream import TokenEvent
from tests.unit.fake_vllm import MODEL, Characters, Wire, chunk, event

FULL = [chunk("a", token_ids=[1]), chunk("b", "stop", token_ids=[2]), event("[DONE]")]


def over(*answers: Any, **options: Any) -> tuple[Wire, list[TokenEvent]]:
    wire = Wire(*answers)
    with openai_completion("http://engine:8000", MODEL, transport=wire, backoff=0, **options) as post:
        return wire, list(post([1], {}))


def failing(wire: Wire, error: type[Exception], match: str, **options: Any) -> list[TokenEvent]:
    """The events before the error, whose message must name the URL."""
    events: list[TokenEvent] = []
    with (
        openai_completion("http://engine:8000", MODEL, transport=wire, backoff=0, **options) as post,
        pytest.raises(error, match=match) as caught,
    ):
        events.extend(post([1], {}))
    assert "http://engine:8000/v1/completions" in str(caught.value)
    return events


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with (
        openai_completion(f"http://127.0.0.1:{port}", MODEL, attempts=2, backoff=0) as post,
        pytest.raises(ServerUnreachable, match=f"http://127.0.0.1:{port}/v1/completions.*is the engine running"),
    ):
        list(post([1], {}))


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.RemoteProtocolError("closed without an answer"),
        [httpx.ReadError("reset")],
        [chunk(""), httpx.ReadError("reset")],
        [],
    ],
    ids=["refused", "connect-timeout", "no-answer", "reset", "reset-after-an-empty-event", "empty"],
)
def test_a_connection_that_breaks_before_the_first_token_is_tried_again(failure):
    wire, events = over(failure, failure, FULL)
    assert events == [TokenEvent(1, "a"), TokenEvent(2, "b")]
    assert wire.requests == 3


def test_tries_are_bounded():
    wire = Wire(*[httpx.ConnectError("refused")] * 5)
    failing(wire, ServerUnreachable, "refused", attempts=3)
    assert wire.requests == 3


@pytest.mark.parametrize("end", [httpx.ReadError("reset"), None], ids=["reset", "silent-end"])
def test_never_again_after_the_first_token(end):
    wire = Wire([FULL[0], *([end] if end else [])], FULL)
    assert failing(wire, ConnectionLost, "after 1 tokens") == [TokenEvent(1, "a")]
    assert wire.requests == 1
    text = Wire([chunk("a"), *([end] if end else [])], FULL)  # text counts, though no event was out yet
    assert failing(text, ConnectionLost, "after 0 tokens", tokenizer=Characters()) == []
    assert text.requests == 1


def test_silence_is_not_retried():
    wire = Wire([httpx.ReadTimeout("")], FULL)
    failing(wire, ServerTimeout, "no answer in time")
    assert wire.requests == 1


def test_other_ends():
    failing(Wire([FULL[0], event({"error": {"message": "out of memory", "code": 500}})]), ServerError, "out of memory")
    failing(Wire([event("{nonsense")]), ProtocolError, "not JSON")
    failing(Wire([event("[1]")]), ProtocolError, "not an object")
    failing(Wire([b'{"choices": []}'], content_type="application/json"), ProtocolError, "event stream")
    # a finish reason is an end too, comments and several tokens in one event are fine
    _, events = over([b": ping\n\n", chunk("ab", "stop", token_ids=[1, 2])])
    assert events == [TokenEvent(1, ""), TokenEvent(2, "ab")]
