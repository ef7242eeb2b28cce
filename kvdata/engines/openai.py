"""`openai_completion`: a ``post_completion`` for any OpenAI-compatible server, over its streamed completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import httpx

try:
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential
except ImportError as missing:
    raise ImportError("kvdata.engines.openai needs tenacity: pip install 'kvdata[train]'") from missing

from kvdata.engines.completion_stream import Answer, Tokenizer, message, shown
from kvdata.errors import (
    ConnectionLost,
    InvalidRequest,
    KVCacheSDKError,
    ProtocolError,
    ServerError,
    ServerTimeout,
    ServerUnreachable,
)
from kvdata.sdk.stream import TokenEvent

# What each way of getting token ids adds to a request.
TOKEN_IDS: dict[str, dict[str, Any]] = {
    "return_token_ids": {"return_token_ids": True},
    "logprobs": {"logprobs": 0, "return_tokens_as_token_ids": True},
    "text": {},
}
_CALLERS_FAULT = (400, 404, 413, 422)


class OpenAICompletion:
    """A ``post_completion(prompt_token_ids, sampling_params, cache_salt)``; see `openai_completion`.

    Safe to call from many threads. Close it, or use it with ``with``.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: Tokenizer | None,
        api_key: str | None,
        token_ids: str,
        timeout: float,
        attempts: int,
        backoff: float,
        transport: httpx.BaseTransport | None,
    ) -> None:
        if urlsplit(base_url).scheme not in ("http", "https"):
            raise InvalidRequest(f"base_url must start with http:// or https://, got {base_url!r}")
        if token_ids not in TOKEN_IDS:
            raise InvalidRequest(f"unknown token_ids {token_ids!r}; known: {', '.join(TOKEN_IDS)}")
        if token_ids == "text" and tokenizer is None:
            raise InvalidRequest("token_ids='text' needs the model's tokenizer=")
        base = base_url.rstrip("/")
        self.url = f"{base}/completions" if base.endswith("/v1") else f"{base}/v1/completions"
        self.model = model
        self._tokenizer, self._token_ids = tokenizer, token_ids
        self._attempts, self._backoff = attempts, backoff
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=min(10.0, timeout), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # an environment's proxy is not meant for an engine next door
            transport=transport,
        )

    def __call__(
        self, prompt_token_ids: Sequence[int], sampling_params: Mapping[str, Any] | None = None, cache_salt: str = ""
    ) -> Iterator[TokenEvent]:
        """One streamed completion, one event per token, as they arrive.

        Raises (while iterating):
            ServerUnreachable, ConnectionLost: no connection, or one that broke.
            ServerTimeout: the server said nothing for `timeout` seconds.
            InvalidRequest, ServerError: the server refused, or failed; with its message.
            ProtocolError: not an OpenAI completion stream, or one without token ids.
        """
        body = self._body(prompt_token_ids, sampling_params or {}, cache_salt)
        answer = Answer(self.url, self._tokenizer)

        def again(exc: BaseException) -> bool:
            return isinstance(exc, ServerUnreachable) and not answer.begun

        first: TokenEvent | None = None
        events: Iterator[TokenEvent] = iter(())
        for attempt in Retrying(
            retry=retry_if_exception(again),
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=self._backoff, max=10.0),
            reraise=True,
        ):
            with attempt:
                events = self._stream(body, answer)
                first = next(events, None)
        with closing(events):  # type: ignore[type-var]  # a generator
            if first is not None:
                yield first
                yield from events

    def close(self) -> None:
        """Close pooled connections."""
        self._client.close()

    def __enter__(self) -> OpenAICompletion:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _body(self, prompt: Sequence[int], params: Mapping[str, Any], salt: str) -> dict[str, Any]:
        if params.get("n", 1) != 1:
            raise InvalidRequest("a stream is one sequence: n must be 1")
        body = {**TOKEN_IDS[self._token_ids], **params}
        body |= {"model": self.model, "prompt": [int(token) for token in prompt], "stream": True}
        if salt:
            body["cache_salt"] = salt
        return body

    def _stream(self, body: dict[str, Any], answer: Answer) -> Iterator[TokenEvent]:
        try:
            with self._client.stream("POST", self.url, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response, self.url)
                if "text/event-stream" not in response.headers.get("content-type", ""):
                    raise ProtocolError(f"{self.url} did not answer with an event stream; does it stream completions?")
                yield from answer.events(response.iter_lines())
        except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
            raise ServerUnreachable(f"{self.url}: {exc}; is the engine running, and is the port right?") from exc
        except httpx.TimeoutException as exc:
            raise ServerTimeout(
                f"{self.url}: no answer in time ({type(exc).__name__}) after {answer.tokens} tokens; a longer timeout= "
                "may be needed for long prompts"
            ) from exc
        except httpx.HTTPError as exc:
            raise ConnectionLost(f"{self.url}: the connection broke after {answer.tokens} tokens: {exc}") from exc


def openai_completion(
    base_url: str,
    model: str,
    *,
    tokenizer: Tokenizer | None = None,
    api_key: str | None = None,
    token_ids: str = "return_token_ids",
    timeout: float = 600.0,
    attempts: int = 4,
    backoff: float = 0.5,
    transport: httpx.BaseTransport | None = None,
) -> OpenAICompletion:
    """A ``post_completion`` for `kvdata.sdk.stream.create_request`.

    Args:
        base_url: of the server, with or without ``/v1``.
        model: the name it serves the model under.
        tokenizer: the model's, for servers that report text only: the whole text is tokenised at the end.
        api_key: sent as a bearer token.
        token_ids: how ids are asked for: ``return_token_ids`` (vLLM 0.10.2 or newer), ``logprobs`` (vLLM's
            ``--return-tokens-as-token-ids``; costs the log-probabilities) or ``text`` (needs `tokenizer`). Whatever
            the answer holds is read.
        timeout: seconds without a byte before `ServerTimeout`; the prefill happens in the first of them.
        attempts: tries when no connection comes about, or it breaks before the first token. Nothing else is retried.
        backoff: seconds; upper bound of the random wait before the second try, doubled each time.
        transport: instead of the network, for tests.
    """
    return OpenAICompletion(base_url, model, tokenizer, api_key, token_ids, timeout, attempts, backoff, transport)


def _refusal(response: httpx.Response, url: str) -> KVCacheSDKError:
    try:
        said = message(response.json())
    except ValueError:
        said = shown(response.text)
    kind = InvalidRequest if response.status_code in _CALLERS_FAULT else ServerError
    return kind(f"{url} answered {response.status_code}: {said}")
