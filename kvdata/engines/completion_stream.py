"""Reading a streamed completion of an OpenAI-compatible server into tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvdata.errors import ConnectionLost, ProtocolError, ServerError
from kvdata.sdk.stream import TokenEvent

_PREFIX = "token_id:"
_NUMBERS = re.compile(r"\[\s*-?[\d.]+\s*(,\s*-?[\d.]+\s*)*,?\s*(\]|\.\.\.|$)")
_SHOWN = 300  # characters


class Tokenizer(Protocol):
    """As a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]: ...


class Answer:
    """The tokens of one completion, out of the lines of its server-sent events.

    Attributes:
        begun: something was generated, so that the request must not be repeated.
        tokens: ids handed out so far.
    """

    def __init__(self, url: str, tokenizer: Tokenizer | None) -> None:
        self.url = url
        self.begun = False
        self.tokens = 0
        self._tokenizer = tokenizer
        self._text = ""

    def events(self, lines: Iterable[str]) -> Iterator[TokenEvent]:
        """Events as they arrive; `ConnectionLost` when the lines end before the completion does."""
        finished = False
        for line in lines:
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                finished = True
                break
            for choice in self._choices(data):
                yield from self._choice(choice)
                finished = finished or choice.get("finish_reason") is not None
        if not finished:
            raise ConnectionLost(f"{self.url}: the stream ended after {self.tokens} tokens without a finish")
        if self._text and self._tokenizer is not None:
            # Only whole: the pieces of a stream need not fall on token boundaries.
            yield from self._counted(list(self._tokenizer.encode(self._text, add_special_tokens=False)), self._text)

    def _choices(self, data: str) -> list[dict[str, Any]]:
        try:
            chunk = json.loads(data)
        except ValueError as exc:
            raise ProtocolError(f"{self.url} sent an event of {len(data)} characters that is not JSON") from exc
        if not isinstance(chunk, dict):
            raise ProtocolError(f"{self.url} sent an event of {len(data)} characters that is not an object")
        if chunk.get("error") or chunk.get("object") == "error":
            raise ServerError(f"{self.url}: the engine failed after {self.tokens} tokens: {message(chunk)}")
        choices: list[dict[str, Any]] = chunk.get("choices") or []
        return choices

    def _choice(self, choice: dict[str, Any]) -> Iterator[TokenEvent]:
        text = choice.get("text") or ""
        ids = _token_ids(choice)
        self.begun = self.begun or bool(text or ids)
        if ids is not None:
            yield from self._counted(ids, text, _logprobs(choice))
        elif text and self._tokenizer is None:
            raise ProtocolError(
                f"{self.url} reports no token ids. vLLM does with return_token_ids (0.10.2 or newer); or start it with "
                "--return-tokens-as-token-ids and pass token_ids='logprobs'; or pass the model's tokenizer="
            )
        else:
            self._text += text

    def _counted(self, ids: list[int], text: str, logprobs: Sequence[float] = ()) -> Iterator[TokenEvent]:
        """One event per id; the text of several goes with the last."""
        for place, token in enumerate(ids, start=1):
            self.tokens += 1
            known = logprobs[place - 1] if len(logprobs) == len(ids) else None
            yield TokenEvent(int(token), text if place == len(ids) else "", known)


def _token_ids(choice: Mapping[str, Any]) -> list[int] | None:
    """Ids that a choice reports in either way; None when it reports none."""
    ids = choice.get("token_ids")
    if ids is not None:
        return list(ids)
    tokens = (choice.get("logprobs") or {}).get("tokens") or []
    if tokens and all(str(token).startswith(_PREFIX) for token in tokens):
        return [int(token.removeprefix(_PREFIX)) for token in tokens]
    return None


def _logprobs(choice: Mapping[str, Any]) -> list[float]:
    """Log-probabilities of a choice's tokens; none when it reports none."""
    return (choice.get("logprobs") or {}).get("token_logprobs") or []


def message(answer: Any) -> str:
    """What a server's error object says, as `shown`."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return shown(str(error.get("message", error) if isinstance(error, dict) else error))


def shown(said: str) -> str:
    """The beginning of what a server said, without lists of numbers: its validators repeat the prompt they refuse."""
    return _NUMBERS.sub("[...]", said)[:_SHOWN]
