"""A completions server that streams as vLLM does, and a wire that breaks where a test wants it to."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

MODEL = "fake"
PIECES = ["Hel", "lo", ",", " world"]


def event(data: Any) -> bytes:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def chunk(text: str, finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None, **fields}
    return event({"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": [choice]})


class FakeVLLM:
    """Counts requests; generates `PIECES` as the ids 100, 101, ..."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.ids_flag = True  # a server new enough for return_token_ids
        self.dies_at: int | None = None  # the piece at which the engine dies, closing the connection

    async def complete(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if body["model"] != MODEL:
            message = f"The model `{body['model']}` does not exist."
            return JSONResponse({"error": {"message": message, "type": "NotFoundError", "code": 404}}, 404)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> Any:
        count = min(body.get("max_tokens", 16), len(PIECES))
        for place, text in enumerate(PIECES[:count]):
            if place == self.dies_at:
                raise RuntimeError("the engine died")
            fields: dict[str, Any] = {}
            if body.get("return_token_ids") and self.ids_flag:
                fields = {"token_ids": [100 + place], "prompt_token_ids": body["prompt"] if not place else None}
            if body.get("logprobs") is not None:
                fields["logprobs"] = {"tokens": [f"token_id:{100 + place}"], "token_logprobs": [-0.5]}
            if place == count - 1:
                fields["finish"] = "length"
            yield chunk(text, **fields)
        yield event({"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": count}})
        yield event("[DONE]")


@contextmanager
def serving(vllm: FakeVLLM) -> Iterator[str]:
    """The URL at which `vllm` answers inside the block."""
    app = Starlette(routes=[Route("/v1/completions", vllm.complete, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    listener.close()


class Wire(httpx.BaseTransport):
    """Answers each request with the next of `answers`: bytes that arrive, then perhaps an error."""

    def __init__(self, *answers: Any, content_type: str = "text/event-stream; charset=utf-8") -> None:
        self.answers, self.requests, self.content_type = list(answers), 0, content_type

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(200, headers={"content-type": self.content_type}, stream=Pieces(answer))


class Pieces(httpx.SyncByteStream):
    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece


class Characters:
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]
