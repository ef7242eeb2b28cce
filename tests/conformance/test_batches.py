"""Many prefixes at once, and parts of them: the same bytes as one by one and whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvdata import KVLayout
from kvdata.client.selection import Selection
from kvdata.errors import GeometryMismatch, InvalidRequest
from tests.conformance.conftest import LAYOUT, fresh_tokens, random_kv

WIDE = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16)


def packed(packing: str) -> KVLayout:
    return replace(WIDE, packing=packing, block_size=32 if packing.startswith("vllm") else None)


def test_hits_misses_and_parts_of_a_batch_keep_their_places(connect):
    ctx = connect()
    prompts = [fresh_tokens(count) for count in (128, 200, 64, 30, 0, 128)]
    salts = ["", "a", "", "", "", "b"]
    caches = {0: random_kv(128), 1: random_kv(192), 5: random_kv(64)}
    for place, kv in caches.items():
        ctx.store(kv, prompts[place][: kv.shape[2]], salts[place])
    assert ctx.lookup_many(prompts, salts) == [128, 192, 0, 0, 0, 64]
    found = ctx.retrieve_many(prompts, salts)
    for place in range(6):
        assert torch.equal(found[place], caches[place]) if place in caches else found[place] is None
    buffer = torch.zeros(6, 2, 3, 200, LAYOUT.hidden, dtype=LAYOUT.dtype)
    seen = []

    def outs(hits):
        seen.append(hits)
        return [row if hit >= 128 else None for row, hit in zip(buffer, hits, strict=True)]

    found = ctx.retrieve_many(prompts, salts, outs=outs)
    assert seen == [[128, 192, 0, 0, 0, 64]]
    assert [kv is None for kv in found] == [False, False, True, True, True, True]
    assert torch.equal(buffer[1, :, :, :192], caches[1])
    assert not buffer[2:].any()
    assert ctx.lookup_many([]) == ctx.retrieve_many([]) == []
    with pytest.raises(InvalidRequest, match="2 salts for 6"):
        ctx.lookup_many(prompts, ["", ""])


def test_more_than_a_pipeline_holds(connect):
    ctx = connect()
    prompts = [fresh_tokens(64) for _ in range(80)]
    caches = {place: random_kv(64) for place in range(0, 80, 7)}
    for place, kv in caches.items():
        ctx.store(kv, prompts[place])
    assert ctx.lookup_many(prompts) == [64 if place in caches else 0 for place in range(80)]
    found = ctx.retrieve_many(prompts)
    assert all(torch.equal(found[place], kv) for place, kv in caches.items())


@pytest.mark.parametrize("packing", ["split", "fused", "vllm-cpu", "vllm-cpu-amx"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_any_part_equals_that_part_of_the_whole(connect, server, packing, world_size):
    ctx = connect(packed(packing), f"tests/parts-{packing}-{world_size}", world_size=world_size)
    tokens = fresh_tokens(192)
    kv = torch.randn(2, 3, 192, WIDE.hidden).to(WIDE.dtype)
    ctx.store(kv, tokens)
    by_head = kv.unflatten(-1, (2, 16))
    parts = [
        ({"kinds": ("k",)}, kv[:1]),
        ({"kinds": ("v",), "layers": [2, 0]}, kv[1:, [2, 0]]),
        ({"heads": [1]}, by_head[..., 1:, :].flatten(-2)),
        ({"heads": [1, 0, 1], "layers": slice(1, None)}, by_head[:, 1:, :, [1, 0, 1]].flatten(-2)),
        ({"window": slice(64, 128)}, kv[:, :, 64:128]),
        ({"window": slice(-50, None)}, kv[:, :, -50:]),
        ({"window": slice(70, 75), "kinds": ("v",)}, kv[1:, :, 70:75]),
        ({"window": slice(30, 130), "heads": slice(0, 1), "layers": [1]}, by_head[:, 1:2, 30:130, :1].flatten(-2)),
        ({"window": slice(500, 600)}, kv[:, :, :0]),
        ({"layers": []}, kv[:, :0]),
    ]
    for asked, expected in parts:
        assert torch.equal(ctx.retrieve(tokens, **asked), expected), asked
        out = torch.zeros(expected.shape, dtype=torch.float32)  # converted on the way
        ctx.retrieve(tokens, out=out, **asked)
        assert torch.equal(out, expected.float()), asked
    read = ctx.stats()["retrieved_bytes"]
    ctx.retrieve(tokens, kinds=("k",), layers=[0], window=slice(0, 10))
    assert ctx.stats()["retrieved_bytes"] - read == 10 * WIDE.hidden * 2


def test_parts_that_do_not_exist_are_refused(connect):
    ctx = connect()
    tokens = fresh_tokens(64)
    ctx.store(random_kv(64), tokens)
    with pytest.raises(GeometryMismatch, match=r"heads \[2\] do not exist"):
        ctx.retrieve(tokens, heads=[2])
    with pytest.raises(InvalidRequest, match="kinds must be"):
        Selection(kinds=("q",))
    with pytest.raises(InvalidRequest, match="without a step"):
        Selection(window=slice(0, 10, 2))
