"""What goes in comes out, and the ways in which it may not be there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvdata import KVLayout, close, retrieve, store
from kvdata.edits.address import compressed_address
from kvdata.errors import CacheLocked, GeometryMismatch, InvalidRequest, ModelNotRegistered
from kvdata.sdk import connect as sdk_connect
from tests.conformance.conftest import LAYOUT, MODEL, delete_is_refused, fresh_tokens, random_kv


@pytest.mark.parametrize("packing", ["split", "fused", "vllm-cpu", "vllm-cpu-amx"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_trip_is_bit_exact(connect, dtype, packing):
    layout = KVLayout(3, 2, 16, dtype, packing, block_size=32)
    ctx = connect(layout, model=f"tests/{packing}-{dtype}")
    tokens, kv = fresh_tokens(200), random_kv(200, layout)
    assert store(ctx, kv, tokens) is True
    found = retrieve(ctx, tokens)
    assert found is not None
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(found, kv[:, :, :192])  # three whole chunks of 64
    with ctx.lease(tokens) as chunks:
        leased = torch.cat([chunk.flatten(3) for chunk in chunks], dim=2)
    assert torch.equal(leased, kv[:, :, :192])


def test_all_kinds_of_token_input_address_the_same(connect):
    ctx = connect()
    tokens = fresh_tokens(64)
    ctx.store(random_kv(64), tokens)
    for same in (tuple(tokens), np.array(tokens), np.array(tokens, dtype=np.uint32), torch.tensor(tokens)):
        assert ctx.lookup(same) == 64


def test_partial_hit_returns_the_cached_head(connect):
    ctx = connect()
    tokens, kv = fresh_tokens(256), random_kv(256)
    ctx.store(kv[:, :, :128], tokens[:128])
    assert ctx.lookup(tokens) == 128
    assert torch.equal(ctx.retrieve(tokens), kv[:, :, :128])
    assert ctx.stats()["partial_hits"] == 2
    assert ctx.store(kv, tokens) is True
    assert (ctx.last_store.stored, ctx.last_store.deduplicated) == (2, 2)
    assert torch.equal(ctx.retrieve(tokens), kv)


def test_nothing_cached_is_none(connect):
    ctx = connect()
    assert ctx.retrieve([]) is None
    assert ctx.retrieve(fresh_tokens(63)) is None
    assert ctx.retrieve(fresh_tokens(500)) is None
    assert ctx.lookup(fresh_tokens(500)) == 0
    with ctx.lease(fresh_tokens(500)) as chunks:
        assert chunks == []
    assert ctx.stats()["misses"] == 5


def test_second_store_is_deduplicated_and_changes_nothing(connect):
    ctx = connect()
    tokens, first, second = fresh_tokens(128), random_kv(128), random_kv(128)
    assert ctx.store(first, tokens) is True
    assert ctx.store(second, tokens) is False
    assert (ctx.last_store.chunks, ctx.last_store.stored, ctx.last_store.deduplicated) == (2, 0, 2)
    assert torch.equal(ctx.retrieve(tokens), first)


def test_salts_keep_caches_apart(connect):
    ctx = connect()
    tokens, plain, salted = fresh_tokens(64), random_kv(64), random_kv(64)
    ctx.store(plain, tokens)
    assert ctx.retrieve(tokens, "team-a") is None
    ctx.store(salted, tokens, "team-a")
    assert torch.equal(ctx.retrieve(tokens), plain)
    assert torch.equal(ctx.retrieve(tokens, cache_salt="team-a"), salted)


def test_prompts_with_a_common_head_and_their_compressed_caches(connect):
    """Two prompts share a head and so do their compressed addresses' tokens; nobody gets the other's."""
    ctx = connect()
    head = fresh_tokens(128)
    prompts = [head + fresh_tokens(128), head + fresh_tokens(128)]
    caches = [random_kv(256) for _ in prompts]
    caches[1][:, :, :128] = caches[0][:, :, :128]
    for prompt, kv in zip(prompts, caches, strict=True):
        ctx.store(kv, prompt)
    assert ctx.last_store.deduplicated == 2
    compressed = [random_kv(64), random_kv(64)]
    for prompt, kv in zip(prompts, compressed, strict=True):
        tokens, salt = compressed_address(prompt, 64, policy="keydiff")
        assert ctx.store(kv, tokens, salt) is True
    for prompt, kv, small in zip(prompts, caches, compressed, strict=True):
        tokens, salt = compressed_address(prompt, 64, policy="keydiff")
        assert torch.equal(ctx.retrieve(prompt), kv)
        assert torch.equal(ctx.retrieve(tokens, salt), small)


def test_layers_and_out_copy_only_what_is_asked_for(connect):
    ctx = connect()
    tokens, kv = fresh_tokens(128), random_kv(128)
    ctx.store(kv, tokens)
    assert torch.equal(ctx.retrieve(tokens, layers=[2, 0]), kv[:, [2, 0]])
    assert torch.equal(ctx.retrieve(tokens, layers=slice(1, None)), kv[:, 1:])
    buffer = torch.full((2, 3, 200, LAYOUT.hidden), 7.0, dtype=LAYOUT.dtype)
    view = ctx.retrieve(tokens, out=buffer)
    assert view.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:, :, :128], kv)
    assert bool((buffer[:, :, 128:] == 7).all())
    with pytest.raises(GeometryMismatch, match="out has shape"):
        ctx.retrieve(tokens, out=buffer[:, :, :100])
    with pytest.raises(GeometryMismatch, match="do not exist"):
        ctx.retrieve(tokens, layers=[3])


def test_delete_removes_what_no_reader_holds(connect, server):
    ctx = connect()
    tokens, kv = fresh_tokens(128), random_kv(128)
    ctx.store(kv, tokens)
    if delete_is_refused(server, ctx, tokens):
        return
    with ctx.lease(tokens) as chunks:
        if server.transfer == "shm":  # a pickle lease is a copy and holds nothing
            with pytest.raises(CacheLocked, match=r"2 chunks .* delete again later .server tcp:"):
                ctx.delete(tokens)
        assert torch.equal(chunks[1].flatten(3), kv[:, :, 64:])
    assert ctx.delete(tokens) == 2
    assert ctx.retrieve(tokens) is None
    assert ctx.delete(tokens) == 0


def test_nested_leases_of_one_prefix_do_not_take_each_others_locks(connect, server):
    ctx = connect()
    tokens, kv = fresh_tokens(64), random_kv(64)
    ctx.store(kv, tokens)
    with ctx.lease(tokens):
        with ctx.lease(tokens):
            pass
        if server.transfer == "shm":
            assert server.memory()["read_locked_count"] == 1
        assert torch.equal(ctx.retrieve(tokens), kv)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda kv: (kv[:, :2], 64), GeometryMismatch, "shape"),
        (lambda kv: (kv[..., :8], 64), GeometryMismatch, "shape"),
        (lambda kv: (kv[0], 64), GeometryMismatch, "shape"),
        (lambda kv: (kv.float(), 64), GeometryMismatch, r"kv\.to\(torch\.bfloat16\)"),
        (lambda kv: (kv, 63), GeometryMismatch, "agree in T"),
        (lambda kv: (kv[:, :, :10], 10), InvalidRequest, "less than one chunk"),
    ],
)
def test_wrong_geometry_is_refused_before_anything_is_sent(connect, server, make, error, match):
    ctx = connect()
    before = server.memory()["total_object_count"]
    kv, count = make(random_kv(64))
    with pytest.raises(error, match=match):
        ctx.store(kv, fresh_tokens(count))
    assert server.memory()["total_object_count"] == before


@pytest.mark.parametrize("tokens", [[1.5] * 64, [True] * 64, [-1] * 64, [2**32] * 64, [[1] * 64], "x" * 64])
def test_bad_token_ids_are_refused_before_anything_is_sent(connect, tokens):
    with pytest.raises(InvalidRequest, match="token ids"):
        connect().lookup(tokens)


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129])
def test_bad_salts_are_refused_before_anything_is_sent(connect, salt):
    with pytest.raises(InvalidRequest, match="cache_salt"):
        connect().lookup(fresh_tokens(64), salt)


def test_an_unregistered_model_is_an_error_and_names_the_nearest(connect, server):
    connect(model="tests/known-model")
    with pytest.raises(ModelNotRegistered, match="did you mean 'tests/known-model'"):
        sdk_connect(server.url, server.http_url, "tests/knwon-model")


def test_every_context_with_the_layout_sees_the_same_cache(connect, server):
    """No engine runs: the second context registers the model itself instead of reporting a miss."""
    tokens, kv = fresh_tokens(64), random_kv(64)
    ctx = connect()
    ctx.store(kv, tokens)
    ctx.close()
    assert server.status()["non_cuda_context_meta"] == {}
    assert torch.equal(connect().retrieve(tokens), kv)


def test_the_functions_of_the_sdk(server):
    ctx = sdk_connect(server.url, server.http_url, MODEL, timeout=20, layout=LAYOUT)
    tokens, kv = fresh_tokens(64), random_kv(64)
    assert store(ctx, kv=kv, tokens=tokens, cache_salt="sdk") is True
    assert torch.equal(retrieve(ctx, tokens=tokens, cache_salt="sdk"), kv)
    close(ctx)
    close(ctx)
    with pytest.raises(InvalidRequest, match="closed"):
        ctx.lookup(tokens)


def test_another_layout_of_the_same_bytes_is_seen_as_such(connect):
    """fused and split differ only in order: reading one as the other gives other values, never an error."""
    tokens, kv = fresh_tokens(64), random_kv(64)
    split, fused = connect(), connect(replace(LAYOUT, packing="fused"), model="tests/fused-too")
    split.store(kv, tokens)
    fused.store(kv, tokens)
    with split.lease(tokens) as a, fused.lease(tokens) as b:
        assert a[0].stride() != b[0].stride()
        assert torch.equal(a[0], b[0])
