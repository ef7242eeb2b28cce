"""Batched streams on an embedded server: the phases, and where an edit's result goes."""

from __future__ import annotations

import json

import pytest
import torch

import kvdata.sdk.request
from kvdata.errors import ConnectionLost, InvalidRequest, StoreConflict
from kvdata.sdk.batch import LMCacheBatchedStream
from kvdata.sdk.metrics import Metrics
from kvdata.sdk.stream import LMCacheSDKCacheKind, TokenEvent, create_request
from tests.unit.conftest import fresh_tokens
from tests.unit.fake_engine import CHUNK, Engine, Halve, batch_of, kv_of


def test_prefill_modify_decode(ctx):
    engine = Engine(ctx)
    prompts = [fresh_tokens(4 * CHUNK + 5), fresh_tokens(2 * CHUNK)]
    streams = [create_request(ctx, engine, prompt, "team") for prompt in prompts]
    batch = batch_of(*streams)

    prefill = batch.prefill({"temperature": 0.0, "max_tokens": 50, "min_tokens": 9})
    assert all(params == {"temperature": 0.0, "max_tokens": 1} for _, params, _ in engine.requests)
    assert (prefill.streams, prefill.input_tokens, prefill.output_tokens) == (2, 6 * CHUNK + 5, 2)
    assert streams[0].tokens == [*prompts[0], 900]

    seen = {}

    def reversed_tokens(kv, tokens):
        seen[tokens[0]] = kv
        return kv.flip(2)[:, :, :CHUNK], tokens[::-1][:CHUNK]

    modify = batch.modify(reversed_tokens)
    assert (modify.input_tokens, modify.output_tokens) == (6 * CHUNK, 2 * CHUNK)
    assert torch.equal(seen[prompts[0][0]], kv_of(prompts[0])[:, :, : 4 * CHUNK])
    address = prompts[0][: 4 * CHUNK][::-1][:CHUNK]
    assert streams[0].tokens == address
    assert streams[0].suffix_tokens == [*prompts[0][4 * CHUNK :], 900]  # the partial tail and what came since
    assert torch.equal(ctx.retrieve(address, "team"), kv_of(prompts[0])[:, :, : 4 * CHUNK].flip(2)[:, :, :CHUNK])

    engine.requests.clear()
    decode = batch.decode({"max_tokens": 3})
    sent = {tuple(prompt) for prompt, _, salt in engine.requests if salt == "team"}
    assert tuple(address + prompts[0][4 * CHUNK :] + [900]) in sent
    assert (decode.input_tokens, decode.output_tokens) == (2 * CHUNK + 5 + 2, 6)
    assert streams[0].output_tokens == [900, 900, 901, 902]
    assert streams[0].output_text == "<0><0><1><2>"
    assert not streams[0].suffix_tokens


def test_an_edit_that_derives_its_address_hands_the_salt_on(ctx):
    engine, prompt = Engine(ctx), fresh_tokens(4 * CHUNK + 1)
    stream = create_request(ctx, engine, prompt)
    batch = batch_of(stream)
    batch.prefill()
    batch.modify(Halve())
    assert stream.cache_salt == "~half"
    assert torch.equal(ctx.retrieve(prompt, "~half"), kv_of(prompt)[:, :, : 2 * CHUNK] * 2)
    assert torch.equal(ctx.retrieve(prompt), kv_of(prompt)[:, :, : 4 * CHUNK])  # the source stays
    batch.decode({"max_tokens": 2})
    assert engine.requests[-1] == ([*prompt[: 2 * CHUNK], prompt[-1], 900], {"max_tokens": 2}, "~half")
    batch.modify(Halve())  # again, on the edited cache
    assert stream.cache_salt == "~half~half"


def test_the_same_derived_edit_again_is_fine_but_another_result_is_refused(ctx):
    class Other(Halve):
        def derive(self, kv, *rest):
            return super().derive(kv + 1, *rest)

    engine, prompt = Engine(ctx), fresh_tokens(2 * CHUNK)

    def prefilled() -> LMCacheBatchedStream:
        batch = batch_of(create_request(ctx, engine, prompt))
        batch.prefill()
        return batch

    prefilled().modify(Halve())
    prefilled().modify(Halve())
    with pytest.raises(StoreConflict, match="new revision="):
        prefilled().modify(Other())


def test_changed_kv_under_the_old_address_is_refused_and_the_stream_stays(ctx):
    stream = create_request(ctx, Engine(ctx), fresh_tokens(2 * CHUNK + 3))
    batch = batch_of(stream)
    batch.prefill()
    before = list(stream.tokens)
    with pytest.raises(StoreConflict, match="never overwrites"):
        batch.modify(lambda kv, tokens: (kv + 1, tokens))
    assert stream.tokens == before
    assert not stream.suffix_tokens
    fresh = create_request(ctx, Engine(ctx), before)
    batch_of(fresh).modify(lambda kv, tokens: (kv, tokens))  # unchanged KV loses nothing
    assert fresh.error is None


def test_a_changed_second_chunk_behind_a_shared_first_is_refused_too(ctx):
    prompt = fresh_tokens(2 * CHUNK)
    held = kv_of(prompt)
    ctx.store(held[:, :, :CHUNK], prompt[:CHUNK])
    stream = create_request(ctx, Engine(ctx), prompt)
    stream.tokens = list(prompt)
    changed = held.clone()
    changed[0, 0, 0, 0] += 1  # in the chunk that is there already; the second one is new
    with pytest.raises(StoreConflict):
        stream.modify(lambda kv, tokens: (changed, prompt), settle_seconds=0)


def test_what_does_not_fill_a_chunk_is_sent_as_tokens(ctx):
    engine, prompt = Engine(ctx), fresh_tokens(3 * CHUNK + 2)
    stream = create_request(ctx, engine, prompt)
    batch = batch_of(stream)
    batch.prefill()
    other = fresh_tokens(CHUNK + 7)
    batch.modify(lambda kv, tokens: (kv[:, :, : CHUNK + 7], other))
    assert (stream.tokens, stream.suffix_tokens) == (other[:CHUNK], [*other[CHUNK:], *prompt[-2:], 900])
    batch.decode({"max_tokens": 1})
    assert engine.requests[-1][0] == [*other, *prompt[-2:], 900]


def test_both_forms_of_edit(ctx):
    assert kvdata.sdk.request.create_request is create_request
    engine, given = Engine(ctx), []

    def later(tensors, tokens):
        given.append(tensors)
        assert tensors["kv"] is tensors[LMCacheSDKCacheKind.KV]
        return tensors["kv"][:, :, :CHUNK], fresh_tokens(CHUNK)

    def as_dict(tensors, tokens):
        new, ids = later(tensors, tokens)
        return {"kv": new}, ids

    for fn in (later, as_dict):
        batch = batch_of(create_request([ctx], engine, fresh_tokens(2 * CHUNK)))
        batch.prefill()
        assert batch.modify(fn).output_tokens == CHUNK
    assert all(isinstance(tensors, dict) for tensors in given)
    built_in = create_request([ctx], engine, fresh_tokens(2 * CHUNK))
    batch = batch_of(built_in)
    batch.prefill()
    batch.modify(Halve())
    assert built_in.cache_salt == "~half"
    with pytest.raises(InvalidRequest, match="2 contexts"):
        create_request([ctx, ctx], engine, [1])


def test_is_done_says_that_the_end_came_early(ctx):
    def two(prompt, params, salt):
        yield from (TokenEvent(1), TokenEvent(2))

    stream = create_request(ctx, two, [5])
    stream.generate({"max_tokens": 2})
    assert not stream.is_done
    stream.generate({"max_tokens": 3})
    assert stream.is_done


def test_metrics_as_table_and_as_json():
    decode = Metrics("decode", 8, 4.0, 24_000, 512, {3: ConnectionLost("gone")})
    assert (decode.input_tput, decode.output_tput) == (6000.0, 128.0)
    found = json.loads(json.dumps(decode.to_dict()))
    assert found["output_tput"] == 128.0
    assert found["errors"] == {"3": "ConnectionLost: gone"}
    assert "128.0 tokens/s" in str(decode)
    assert "6,000.0 tokens/s" in str(Metrics("prefill", 8, 4.0, 24_000, 8))
    assert "tokens stored" in str(Metrics("modify", 8, 4.0, 24_000, 12_000))
    assert Metrics("modify", 0, 0.0).input_tput == 0.0
