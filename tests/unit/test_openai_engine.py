"""`openai_completion` against a server that streams as vLLM does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from kvdata.engines.openai import openai_completion
from kvdata.errors import ConnectionLost, InvalidRequest, ProtocolError, ServerError
from kvdata.sdk.stream import TokenEvent
from tests.unit.fake_vllm import MODEL, Characters, FakeVLLM, serving


@pytest.fixture
def vllm() -> FakeVLLM:
    return FakeVLLM()


@pytest.fixture
def base_url(vllm: FakeVLLM) -> Iterator[str]:
    with serving(vllm) as url:
        yield url


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_ids_texts_and_salt(base_url, vllm, suffix):
    with openai_completion(base_url + suffix, MODEL, api_key="secret") as post:
        events = list(post([5, 6, 7], {"max_tokens": 3, "temperature": 0.0, "stream": False}, "team~r1"))
        assert [e.token_id for e in events] == [100, 101, 102]
        assert "".join(e.text for e in events) == "Hello,"
        assert [e.token_id for e in post([5], {"max_tokens": 1})] == [100]
    first, second = vllm.bodies
    assert first == {
        "model": MODEL,
        "prompt": [5, 6, 7],
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "cache_salt": "team~r1",
        "return_token_ids": True,
    }
    assert "cache_salt" not in second  # vLLM refuses an empty one
    assert vllm.headers[0]["authorization"] == "Bearer secret"


def test_ids_from_logprobs(base_url, vllm):
    vllm.ids_flag = False
    with openai_completion(base_url, MODEL, token_ids="logprobs") as post:
        events = list(post([5], {"max_tokens": 2}))
    assert events == [TokenEvent(100, "Hel", -0.5), TokenEvent(101, "lo", -0.5)]
    assert vllm.bodies[0]["logprobs"] == 0
    assert "return_token_ids" not in vllm.bodies[0]


@pytest.mark.parametrize("mode", ["text", "return_token_ids"])
def test_ids_from_the_whole_text(base_url, vllm, mode):
    vllm.ids_flag = False
    with openai_completion(base_url, MODEL, tokenizer=Characters(), token_ids=mode) as post:
        events = list(post([5], {"max_tokens": 2}))
    assert [e.token_id for e in events] == [ord(c) for c in "Hello"]
    assert "".join(e.text for e in events) == "Hello"
    assert ("return_token_ids" in vllm.bodies[0]) == (mode != "text")


def test_no_ids_at_all_says_how_to_get_them(base_url, vllm):
    vllm.ids_flag = False
    with openai_completion(base_url, MODEL) as post, pytest.raises(ProtocolError, match=r"token_ids='logprobs'"):
        list(post([5], {"max_tokens": 2}))
    assert len(vllm.bodies) == 1


def test_a_refusal_carries_the_servers_words_and_is_not_repeated(base_url, vllm):
    with openai_completion(base_url, "other") as post:
        with pytest.raises(InvalidRequest, match=f"{base_url}/v1/completions answered 404: The model `other`"):
            list(post([5], {}))
        assert len(vllm.bodies) == 1
        with pytest.raises(InvalidRequest, match="n must be 1"):
            list(post([5], {"n": 2}))
    overloaded = httpx.MockTransport(lambda request: httpx.Response(503, text="busy"))
    with (
        openai_completion(base_url, MODEL, transport=overloaded) as post,
        pytest.raises(ServerError, match="503: busy"),
    ):
        list(post([5], {}))


def test_a_reader_that_stops_early_closes_the_connection(base_url):
    with openai_completion(base_url, MODEL) as post:
        events = post([5], {"max_tokens": 4})
        assert next(events).token_id == 100
        events.close()
        assert [e.token_id for e in post([5], {"max_tokens": 4})] == [100, 101, 102, 103]


@pytest.mark.parametrize("place", [0, 2])
def test_a_server_that_dies_in_its_answer(base_url, vllm, place):
    vllm.dies_at = place
    events: list[TokenEvent] = []
    with (
        openai_completion(base_url, MODEL, attempts=2, backoff=0) as post,
        pytest.raises(ConnectionLost, match=f"{base_url}.*after {place} tokens"),
    ):
        events.extend(post([5], {}))
    assert [e.token_id for e in events] == [100, 101][:place]
    assert len(vllm.bodies) == (1 if place else 2)


def test_many_threads_share_one(base_url):
    found: dict[int, list[TokenEvent]] = {}
    with openai_completion(base_url, MODEL) as post:

        def ask(number: int) -> None:
            found[number] = list(post([number], {"max_tokens": 4}))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert [len(events) for events in found.values()] == [4] * 8


def test_wrong_arguments():
    with pytest.raises(InvalidRequest, match="must start with http"):
        openai_completion("localhost:8000", MODEL)
    with pytest.raises(InvalidRequest, match="unknown token_ids"):
        openai_completion("http://engine", MODEL, token_ids="guess")
    with pytest.raises(InvalidRequest, match="needs the model's tokenizer"):
        openai_completion("http://engine", MODEL, token_ids="text")
