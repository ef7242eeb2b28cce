"""Filling a server through an engine: what is sent, what is confirmed, what is said about the rest."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request

from kvdata import KVCacheContext, KVCacheDataset, Prefixes, PrefixRecord
from kvdata.datasets.ingest import ingest, read_prompts
from kvdata.errors import ConnectionLost, InvalidRequest, ServerError, ServerUnreachable
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv
from tests.unit.fake_vllm import MODEL, FakeVLLM, serving
from tests.unit.test_cli import kvdata

CHUNK = 32


class StoringVLLM(FakeVLLM):
    """Stores a cache for each prompt, as an engine on the server does."""

    def __init__(self, ctx: KVCacheContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.refuses: set[int] = set()  # first tokens of prompts
        self.loses: set[int] = set()

    async def complete(self, request: Request) -> Any:
        body = await request.json()
        first = body["prompt"][0]
        if first in self.refuses:
            body["model"] = "refused"
            request._json = body
        elif first not in self.loses:
            await asyncio.to_thread(self._store, body["prompt"], body.get("cache_salt", ""))
        return await super().complete(request)

    def _store(self, tokens: list[int], salt: str) -> None:
        whole = len(tokens) // CHUNK * CHUNK
        self.ctx.store(random_kv(whole), tokens[:whole], salt)


def records(*lengths: int) -> Prefixes:
    return Prefixes.of([fresh_tokens(length) for length in lengths])


class Engine:
    """A completion that stores, in this process; remembers what it was asked and by how many at a time."""

    def __init__(self, ctx: KVCacheContext) -> None:
        self.ctx = ctx
        self.asked: list[tuple[int, str]] = []
        self.error: Exception | None = None
        self.most = 0
        self._running = 0
        self._lock = threading.Lock()

    def __call__(self, tokens: list[int], params: dict[str, Any], salt: str) -> Iterator[object]:
        assert params == {"max_tokens": 1, "temperature": 0.0}
        with self._lock:
            self.asked.append((tokens[0], salt))
            self._running += 1
            self.most = max(self.most, self._running)
        try:
            if self.error is not None:
                raise self.error
            whole = len(tokens) // CHUNK * CHUNK
            self.ctx.store(random_kv(whole), tokens[:whole], salt)
            yield object()
        finally:
            with self._lock:
                self._running -= 1


def test_what_is_missing_is_computed_once_and_confirmed(ctx):
    prefixes = records(64, 70, 20, 64)
    ctx.store(random_kv(64), prefixes[3].tokens)
    engine = Engine(ctx)
    seen: list[int] = []

    def progress(items, total):
        assert total == 2
        for item in items:
            seen.append(item[0])
            yield item

    result = ingest(ctx, prefixes, engine, concurrency=1, progress=progress)
    assert (result.stored, result.present, result.short) == ([0, 1], [3], [2])
    assert not result.complete
    assert str(result) == "2 stored, 1 were there already, 1 shorter than a chunk"
    assert seen == [0, 1]
    assert engine.most == 1
    again = ingest(ctx, prefixes, engine)
    assert (again.stored, again.present) == ([], [0, 1, 3])
    assert len(engine.asked) == 2


def test_requests_run_together_up_to_the_bound(ctx):
    prefixes = records(*[32] * 9)
    engine = Engine(ctx)
    together = threading.Barrier(3)

    def complete(tokens, params, salt):
        together.wait(20)  # returns only when three are here at once
        yield from engine(tokens, params, salt)

    assert ingest(ctx, prefixes, complete, concurrency=3).complete
    assert engine.most <= 3


def test_salts_of_records_go_first(ctx):
    tokens = fresh_tokens(64)
    own = PrefixRecord(records(64)[0].tokens, salt="own")
    engine = Engine(ctx)
    assert ingest(ctx, Prefixes.of([tokens, own]), engine, "given").complete
    assert sorted(engine.asked) == sorted([(tokens[0], "given"), (int(own.tokens[0]), "own")])
    assert ctx.lookup(tokens, "given") == 64
    assert ctx.lookup(tokens) == 0


def test_a_refused_prompt_does_not_stop_the_others(ctx):
    prefixes = records(64, 64, 64)
    engine = Engine(ctx)

    def complete(tokens, params, salt):
        if tokens[0] == prefixes[1].tokens[0]:
            raise ServerError("too long")
        return engine(tokens, params, salt)

    result = ingest(ctx, prefixes, complete, concurrency=2)
    assert result.stored == [0, 2]
    assert {place: str(error) for place, error in result.failed.items()} == {1: "too long"}


def test_an_unreachable_engine_is_not_asked_again(ctx):
    engine = Engine(ctx)
    engine.error = ServerUnreachable("nobody there")
    result = ingest(ctx, records(*[32] * 5), engine, concurrency=1)
    assert len(engine.asked) == 1
    assert len(result.failed) == 5


def test_a_connection_that_breaks_costs_one_prompt(ctx):
    prefixes = records(64, 64, 64)
    engine = Engine(ctx)

    def complete(tokens, params, salt):
        if tokens[0] == prefixes[0].tokens[0]:
            raise ConnectionLost("broke")
        return engine(tokens, params, salt)

    result = ingest(ctx, prefixes, complete, concurrency=1)
    assert (list(result.failed), result.stored) == ([0], [1, 2])


def test_the_continuation_follows_what_is_cached(ctx, connection, tmp_path):
    """A prefix that is not whole chunks: the server has less of it, and the rest comes first."""
    tokens, after = fresh_tokens(70), [9, 8, 7]
    prefixes = Prefixes.of([{"tokens": tokens, "continuation": after}, {"tokens": fresh_tokens(70)}])
    assert ingest(ctx, prefixes, Engine(ctx)).complete
    dataset = KVCacheDataset(prefixes, connection=connection)
    assert dataset[0]["tokens"].tolist() + dataset[0]["continuation"].tolist() == tokens + after
    assert len(dataset[1]["continuation"]) == 0
    dataset.close()


def test_what_does_not_arrive_is_not_called_stored(ctx):
    result = ingest(ctx, records(64), lambda *_: [], settle_seconds=0)
    assert result.unconfirmed == [0]
    assert not result.complete


def test_a_bug_in_the_engine_is_not_swallowed(ctx):
    engine = Engine(ctx)
    engine.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        ingest(ctx, records(64), engine)


class Words:
    """One id per word."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [len(word) for word in text.split()]


def test_prompts_from_texts_and_jsonl(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("a bb ccc dddd eeeee")
    lines = tmp_path / "b.jsonl"
    lines.write_text('{"prompt": "aa b", "id": 7}\n\n{"text": "ccc"}\n')
    whole = read_prompts([text, lines], Words)
    assert [r.tokens.tolist() for r in whole] == [[1, 2, 3, 4, 5], [2, 1], [3]]
    assert whole[0].meta == {"document": 0, "file": "a.txt"}
    assert whole[1].meta == {"document": 1, "id": 7}
    cut = read_prompts([text], Words, window=1, continuation=1)
    assert [(r.tokens.tolist(), r.continuation.tolist()) for r in cut] == [([1], [2]), ([3], [4])]
    (kept,) = read_prompts([text], Words, continuation=2)
    assert (kept.tokens.tolist(), kept.continuation.tolist()) == ([1, 2, 3], [4, 5])
    with pytest.raises(InvalidRequest, match="shorter than the window"):
        read_prompts([text], Words, window=9)


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"question": "x"}', '{"text": 3}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    path = tmp_path / "b.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(InvalidRequest, match="line 2"):
        read_prompts([path], Words)


def test_a_prefix_file_keeps_its_layout(tmp_path):
    path = tmp_path / "p.jsonl"
    Prefixes(records(40), LAYOUT, "unit/model").to_jsonl(path)

    def never() -> Words:
        raise AssertionError("token ids need no tokenizer")

    found = read_prompts([path], never)
    assert (found.layout, found.model_name, len(found)) == (LAYOUT, "unit/model", 1)


def test_the_command_end_to_end(embedded, connection, ctx, tmp_path):
    prefixes = records(64, 64, 64, 20)
    path = tmp_path / "p.jsonl"
    Prefixes(prefixes, None, None).to_jsonl(path)
    vllm = StoringVLLM(ctx)
    vllm.refuses = {int(prefixes[1].tokens[0])}
    vllm.loses = {int(prefixes[2].tokens[0])}
    where = ["--url", embedded.url, "--http-url", embedded.http_url, "--model-name", connection.model_name]
    with serving(vllm) as engine:
        command = ["ingest", str(path), *where, "--engine", engine, "--served-name", MODEL, "--cache-salt", "s"]
        some = kvdata(*command, "--settle", "0")
        assert some.returncode == 3, some.stderr
        assert "1 stored, 0 were there already, 1 failed, 1 not found" in some.stdout
        assert "1 shorter than a chunk" in some.stdout
        assert "prefix 1: InvalidRequest" in some.stderr
        vllm.refuses, vllm.loses = set(), set()
        rest = kvdata(*command)
        assert "2 stored, 1 were there already, 1 shorter than a chunk" in rest.stdout
    assert rest.returncode == 3  # the short one never fits
    written = Prefixes.from_jsonl(path)
    assert (written.layout, written.model_name) == (LAYOUT, connection.model_name)
    assert [r.salt for r in written] == ["s"] * 4
    dataset = KVCacheDataset(written, embedded.url, embedded.http_url)
    assert dataset[1]["hit_tokens"] == 64
    dataset.close()


def test_the_command_refuses_what_it_cannot_do(embedded, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("some words")
    where = ["--url", embedded.url, "--http-url", embedded.http_url]
    assert kvdata("ingest", str(text), *where).returncode == 2  # neither --engine nor --model
    nameless = kvdata("ingest", str(text), *where, "--engine", "http://127.0.0.1:1", "--out", str(tmp_path / "o.jsonl"))
    assert nameless.returncode == 1
    assert "--model-name" in nameless.stderr
    named = ["--model-name", "no/folder", "--out", str(tmp_path / "o.jsonl")]
    no_tokenizer = kvdata("ingest", str(text), *where, "--engine", "http://127.0.0.1:1", *named)
    assert "--tokenizer" in no_tokenizer.stderr
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"tokens": fresh_tokens(64)}) + "\n")
    no_engine = kvdata("ingest", str(path), *where, "--engine", "http://127.0.0.1:1")
    assert no_engine.returncode == 1
    assert "--model-name" in no_engine.stderr


def test_texts_need_a_file_for_the_result(tmp_path, embedded):
    text = tmp_path / "a.txt"
    text.write_text("some words")
    where = ["--url", embedded.url, "--http-url", embedded.http_url, "--engine", "http://127.0.0.1:1"]
    command = ["ingest", str(text), *where, "--tokenizer", str(tmp_path)]
    assert kvdata(*command).returncode == 2
    no_tokenizer = kvdata(*command, "--out", str(tmp_path / "o.jsonl"))
    assert no_tokenizer.returncode == 1
    assert no_tokenizer.stderr.startswith(f"InvalidRequest: {tmp_path} holds no tokenizer")
