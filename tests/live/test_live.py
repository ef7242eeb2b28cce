"""kvdata beside a real engine: what vLLM wrote is read, what kvdata wrote is decoded from. In this order."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader

from kvdata import Connection, KVCacheDataset, Prefixes, collate, worker_init_fn
from kvdata.client.counters import counters
from kvdata.engines.openai import openai_completion
from kvdata.errors import ModelNotRegistered
from kvdata.sdk.batch import LMCacheBatchedStream
from kvdata.sdk.stream import create_request
from tests.live.conftest import PREFIX, REAP_SECONDS
from tests.live.stack import CHUNK, SERVED_NAME
from tests.servers import Server

CHUNKS = PREFIX // CHUNK


def until(read: Callable[[], int], seconds: float = 20.0) -> int:
    """The first value that is not 0: an engine's stores become visible a little after its answer."""
    deadline = time.monotonic() + seconds
    while not (value := read()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


def read_chunks(server: Server, action: Callable[[], object]) -> int:
    """How many chunks the server counts as read during ``action``."""
    before = counters(server.http_url)["retrieved_chunks"]
    action()
    return until(lambda: counters(server.http_url)["retrieved_chunks"] - before, seconds=5.0)


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """``[2, L, T, D]`` twice -> ``[2, L]``: the difference's norm over that of what was expected."""
    return (found - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))


def test_vllm_serves_and_lmcache_keeps_what_it_computed(server, engine, prompts, connection):
    assert len(engine.complete(prompts[0])) == 24
    with connection.connect() as ctx:
        assert until(lambda: ctx.lookup(prompts[0])) == PREFIX
    assert read_chunks(server, lambda: engine.complete(prompts[0])) == CHUNKS


def test_verify_names_the_packing_and_rules_the_others_out(verified):
    print(verified)
    assert verified.packing in ("vllm-cpu", "vllm-cpu-amx")
    assert verified.tokens == PREFIX
    wrong = {name: errors for name, errors in verified.errors.items() if name != verified.packing}
    assert "fused" in wrong
    assert all(min(errors) > 0.5 for errors in wrong.values())


def test_kv_from_vllm_is_that_of_a_forward(engine, prompts, connection, reference):
    tokens = prompts[1][:PREFIX]
    engine.complete(prompts[1], max_tokens=1)
    with connection.connect() as ctx:
        assert until(lambda: ctx.lookup(tokens)) == PREFIX
        kv = ctx.retrieve(tokens).float()
    error = relative_errors(kv, reference.prefill(tokens).float())
    keys, values = error.amax(1).tolist()
    print(f"relative error, the largest of 30 layers: K {keys:.2%}, V {values:.2%}")
    assert error.shape == (2, 30)
    assert keys < 0.02
    assert values < 0.04


def test_vllm_decodes_from_what_kvdata_stored(server, engine, prompts, connection):
    """The KV of one text under the token ids of another: the engine goes on with the first."""
    source, other, tail = prompts[2][:PREFIX], prompts[3][:PREFIX], prompts[2][PREFIX:]
    engine.complete(source + tail)
    without = engine.complete(other + tail, cache_salt="nothing-stored-here")
    with connection.connect() as ctx:
        assert until(lambda: ctx.lookup(source)) == PREFIX
        # Read from the cache, like the one below: computed in one go, bfloat16 may round a near tie the other way.
        original = engine.complete(source + tail)
        assert ctx.lookup(other) == 0
        assert ctx.store(ctx.retrieve(source), other) is True
    found: list[list[int]] = []
    assert read_chunks(server, lambda: found.append(engine.complete(other + tail))) == CHUNKS
    assert found == [original]
    assert without != original


@pytest.mark.parametrize("form", ["context", "list of contexts"])
@pytest.mark.parametrize("token_ids", ["return_token_ids", "logprobs"])
def test_streams_prefill_modify_and_decode(server, engine, prompts, connection, form, token_ids):
    """An edit of one's own, in both forms; what is decoded comes from the edited cache and follows it."""
    source, other = prompts[4], prompts[5][:PREFIX]
    salt = f"streams-{form}-{token_ids}".replace(" ", "-")

    def as_of_the_source(kv, tokens):
        """The other text's ids get the cache of the source: what the engine then says is the source's."""
        tensor = kv["kv"] if isinstance(kv, dict) else kv
        assert tensor.shape[2] == len(tokens) == PREFIX
        return kv, other

    with connection.connect() as ctx, openai_completion(engine.url, SERVED_NAME, token_ids=token_ids) as complete:
        batch = LMCacheBatchedStream(settle_seconds=20)
        batch.add(create_request(ctx if form == "context" else [ctx], complete, source, salt))
        params = {"temperature": 0.0, "max_tokens": 16}
        assert batch.prefill(params).output_tokens == 1
        assert batch.modify(as_of_the_source).input_tokens == PREFIX
        (stream,) = batch.streams
        found = []
        assert read_chunks(server, lambda: found.append(batch.decode(params))) == CHUNKS
        assert stream.tokens[:PREFIX] == other
        assert found[0].output_tokens == len(stream.output_tokens) - 1 == 16
        assert stream.output_text
        original = engine.complete(source, 17, cache_salt=salt)
    assert stream.output_tokens == original


def test_a_client_leaves_the_engines_registration_alone(server, engine, prompts, connection):
    before = server.status()["cache_context_meta"]
    assert [meta["model_name"] for meta in before.values()] == [engine.model]
    with connection.connect() as ctx:
        tokens = prompts[0][:PREFIX]
        ctx.store(ctx.retrieve(tokens), tokens, "another-salt")
        assert server.status()["cache_context_meta"] == before
    assert server.status()["cache_context_meta"] == before
    assert server.status()["non_cuda_context_meta"] == {}
    assert server.status()["storage_manager"]["l1_manager"]["read_locked_count"] == 0


@pytest.mark.stops_the_engine
def test_the_engine_may_be_stopped_before_the_training(server, engine, prompts, connection, reference, tmp_path):
    """The server forgets the model then, and still has its caches."""
    prefixes = [prompt[:PREFIX] for prompt in prompts]
    for prompt in prompts:
        engine.complete(prompt, max_tokens=1)
    with connection.connect() as ctx:
        assert [until(lambda p=p: ctx.lookup(p)) for p in prefixes] == [PREFIX] * len(prefixes)
        layout = ctx.layout
    names = engine.shared_memory()
    assert any(name.exists() for name in names)
    engine.stop()
    assert not [name for name in names if name.exists()]
    deadline = time.monotonic() + 6 * REAP_SECONDS
    while server.status()["cache_context_meta"] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert server.status()["cache_context_meta"] == {}
    unknown = Connection(server.url, server.http_url, engine.model, timeout=30.0)
    with pytest.raises(ModelNotRegistered):  # and not a miss
        unknown.connect()

    Prefixes(Prefixes.of(prefixes), layout, engine.model).to_jsonl(tmp_path / "prefixes.jsonl")
    dataset = KVCacheDataset(Prefixes.from_jsonl(tmp_path / "prefixes.jsonl"), server.url, server.http_url)
    assert dataset.coverage().hit == list(range(len(prefixes)))
    loader = DataLoader(
        dataset, batch_size=2, shuffle=True, num_workers=2, collate_fn=collate, worker_init_fn=worker_init_fn
    )
    seen = set()
    for batch in loader:
        for index, kv in zip(batch.index.tolist(), batch.kv, strict=True):
            seen.add(index)
            if index == 4:  # neither overwritten nor moved by an earlier test
                assert relative_errors(kv.float(), reference.prefill(prefixes[index]).float()).max() < 0.04
    dataset.close()
    assert seen == set(range(len(prefixes)))
