"""Batched streams on an embedded server: many at once, and what happens when some of it goes wrong."""

from __future__ import annotations

import threading

import pytest

from kvdata.errors import ConnectionLost, GeometryMismatch, InvalidRequest, MissingKV
from kvdata.sdk.batch import LMCacheBatchedStream
from kvdata.sdk.stream import TokenEvent, create_request
from tests.unit.conftest import fresh_tokens
from tests.unit.fake_engine import CHUNK, Engine, Halve, batch_of, kv_of


def test_one_failing_stream_does_not_lose_the_others(ctx):
    engine = Engine(ctx)

    def breaks(prompt, params, salt):
        yield TokenEvent(7, "seven")
        raise ConnectionLost("http://engine: the connection broke")

    good, bad, last = (create_request(ctx, post, fresh_tokens(2 * CHUNK)) for post in (engine, breaks, engine))
    batch = batch_of(good, bad, last)
    report = batch.prefill()
    assert (report.streams, report.input_tokens) == (2, 4 * CHUNK)
    assert list(report.errors) == [1]
    assert report.errors[1] is bad.error
    assert bad.output_text == "seven"  # what came stays
    assert "stream 1 failed: ConnectionLost: http://engine" in str(report)

    def fails_for_last(kv, tokens):
        if tokens[0] == last.tokens[0]:
            raise ValueError("this edit")
        return kv[:, :, :CHUNK], fresh_tokens(CHUNK)

    report = batch.modify(fails_for_last)
    assert {number: type(error) for number, error in report.errors.items()} == {1: ConnectionLost, 2: ValueError}
    report = batch.decode({"max_tokens": 4})
    assert (report.streams, report.output_tokens) == (1, 4)
    assert len(engine.requests) == 3
    with pytest.raises(ConnectionLost):
        batch_of(bad).decode({"max_tokens": 1})  # nobody left


def test_streams_run_at_the_same_time_up_to_the_bound(ctx):
    together, running, most, lock = threading.Barrier(3, timeout=10), 0, 0, threading.Lock()

    def post(prompt, params, salt):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()  # breaks unless three are here at once
        with lock:
            running -= 1
        yield TokenEvent(1)

    batch = batch_of(*(create_request(ctx, post, [n + 1]) for n in range(6)), max_concurrency=3)
    assert batch.decode({"max_tokens": 1}).streams == 6
    assert most == 3


def test_edit_functions_are_never_called_by_two_threads_at_once(ctx):
    engine, two, met = Engine(ctx), threading.Barrier(2), []
    batch = batch_of(*(create_request(ctx, engine, fresh_tokens(CHUNK)) for _ in range(6)), max_edits=4)
    batch.prefill()

    def edit(kv, tokens):
        try:
            met.append(two.wait(0.3))  # once it has broken, it breaks at once
        except threading.BrokenBarrierError:
            pass
        return kv, tokens

    assert batch.modify(edit).streams == 6
    assert not met


def test_modify_waits_for_an_engine_that_is_still_storing(ctx):
    prompt = fresh_tokens(2 * CHUNK)
    stream = create_request(ctx, Engine(ctx), prompt)
    asked, lookup = [], ctx.lookup

    def late(tokens, salt=""):
        asked.append(len(tokens))
        if len(asked) == 3:
            ctx.store(kv_of(prompt), prompt)
        return lookup(tokens, salt)

    ctx.lookup = late
    stream.modify(Halve(), settle_seconds=60)
    assert asked[:3] == [2 * CHUNK] * 3
    assert stream.tokens == prompt[:CHUNK]


def test_a_partly_evicted_cache_is_edited_as_far_as_it_goes(ctx, caplog):
    prompt = fresh_tokens(3 * CHUNK)
    ctx.store(kv_of(prompt)[:, :, : 2 * CHUNK], prompt[: 2 * CHUNK])
    stream = create_request(ctx, Engine(ctx), prompt)
    stream.modify(Halve(), settle_seconds=0)
    assert (stream.tokens, stream.suffix_tokens) == (prompt[:CHUNK], prompt[2 * CHUNK :])
    assert "only 64 of 96 tokens are cached" in caplog.text


def test_errors_say_what_is_wrong(ctx):
    def no_ids(prompt, params, salt):
        yield TokenEvent(-1, "text")

    def modify(tokens, fn=None):
        create_request(ctx, no_ids, tokens).modify(fn or Halve(), settle_seconds=0)

    with pytest.raises(MissingKV, match="Run prefill first"):
        modify(fresh_tokens(2 * CHUNK))
    with pytest.raises(InvalidRequest, match="less than one chunk of 32"):
        modify(fresh_tokens(5))
    with pytest.raises(InvalidRequest, match="return_token_ids"):
        batch_of(create_request(ctx, no_ids, [1])).prefill()
    with pytest.raises(InvalidRequest, match="empty"):
        create_request(ctx, no_ids, [])
    with pytest.raises(InvalidRequest, match="not allowed"):
        create_request(ctx, no_ids, [1], "a@b")
    with pytest.raises(InvalidRequest, match="no streams"):
        LMCacheBatchedStream().decode()
    prompt = fresh_tokens(2 * CHUNK)
    ctx.store(kv_of(prompt), prompt)
    with pytest.raises(GeometryMismatch, match="convert it"):
        modify(prompt, lambda kv, tokens: (kv.float(), tokens))
    stream = create_request(ctx, no_ids, prompt)
    with pytest.raises(InvalidRequest, match="already in the batch"):
        batch_of(stream, stream)
