"""Geometry and byte orders: what a stored chunk's elements mean."""

from __future__ import annotations

import json

import pytest
import torch

from kvdata import KVLayout
from kvdata.client.copying import copy_all
from kvdata.errors import GeometryMismatch, InvalidRequest
from kvdata.layout import Part


def test_layouts_check_themselves_and_survive_json():
    layout = KVLayout(2, 3, 4, torch.float16, "fused")
    assert KVLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert (layout.hidden, layout.token_bytes, layout.chunk_shape(5)) == (12, 96, (2, 5, 24))
    assert layout.with_packing("split").chunk_shape(5) == (2, 2, 5, 12)
    for bad in ((0, 1, 1), (1, True, 1), (1, 1, 1.5), (1, 1, 1, torch.int8), (1, 1, 1, torch.float16, "x")):
        with pytest.raises(InvalidRequest):
            KVLayout(*bad)
    with pytest.raises(InvalidRequest, match="lacks the field"):
        KVLayout.from_dict({"num_layers": 1})


@pytest.mark.parametrize("packing", ["split", "fused"])
def test_a_packing_is_a_permutation_of_the_bytes(packing):
    layout = KVLayout(2, 3, 4, torch.float32, packing)
    chunk = torch.arange(2 * 2 * 5 * 12, dtype=torch.float32).view(layout.chunk_shape(5))
    view = layout.view(chunk)
    assert view.shape == (2, 2, 5, 3, 4)
    assert view.data_ptr() == chunk.data_ptr()
    assert sorted(view.flatten().tolist()) == chunk.flatten().tolist()
    if packing == "fused":  # K of head 1 of token 0 in layer 0 follows K and V of head 0
        assert view[0, 0, 0, 1, 0] == 8
        assert view[1, 0, 0, 0, 0] == 4
    with pytest.raises(GeometryMismatch, match="does not fit"):
        layout.view(chunk.flatten()[:-1])


def amx_block(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One head's block of ``[N, S]`` keys and values as the AMX kernels keep it, element by element."""
    tokens, size = keys.shape
    memory = torch.empty(2 * tokens * size)
    for n in range(tokens):
        for d in range(size):
            k = (n // 16) * 16 * size + (d // 2) * 32 + (n % 16) * 2 + d % 2
            v = (d // 16) * 16 * tokens + (n // 2) * 32 + (d % 16) * 2 + n % 2
            memory[k], memory[tokens * size + v] = keys[n, d], values[n, d]
    return memory


@pytest.mark.parametrize("size", [16, 32, 64])
def test_amx_chunks_are_decoded_whatever_the_head_size(size):
    layout = KVLayout(2, 2, size, torch.float32, "vllm-cpu-amx", block_size=32)
    kv = torch.randn(2, 2, 64, 2, size)
    chunk = torch.empty(2, 64, 2, 2 * size)
    for layer in range(2):
        for head in range(2):
            for start in (0, 32):
                block = amx_block(*kv[:, layer, start : start + 32, head])
                chunk[layer, start : start + 32, head] = block.view(32, 2 * size)
    assert torch.equal(layout.view(chunk), kv)
    back = torch.empty_like(chunk)
    copy_all(layout.encode(kv.flatten(3), back))
    assert torch.equal(back, chunk)
    one = torch.empty(2, 1, 64, 2 * size)
    copy_all(layout.decode(chunk, one, Part(layers=slice(1, 2))))
    assert torch.equal(one, kv[:, 1:2].flatten(3))


def test_amx_needs_units_of_32():
    for size, block in ((8, 32), (16, 16), (16, None)):
        with pytest.raises(InvalidRequest, match="vllm-cpu-amx needs"):
            KVLayout(2, 2, size, torch.float32, "vllm-cpu-amx", block_size=block)


def vllm_cpu_chunk(kv: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """What a server holds of ``[2, L, T, H, S]`` after vLLM's CPU backend stored it, moved element by element."""
    _, layers, tokens, heads, size = kv.shape
    block = layout.block_size
    chunk = torch.empty(layers, tokens, heads, 2 * size)
    for start in range(0, tokens, block):
        for layer in range(layers):
            for head in range(heads):
                keys, values = kv[:, layer, start : start + block, head]
                memory = torch.cat([keys.T.flatten(), values.flatten()])  # the engine's block: K transposed, then V
                chunk[layer, start : start + block, head] = memory.view(block, 2 * size)
    return chunk


@pytest.mark.parametrize("size", [4, 8, 16])
def test_vllm_cpu_chunks_are_decoded_whatever_the_head_size(size):
    layout = KVLayout(3, 2, size, torch.float32, "vllm-cpu", block_size=16)
    kv = torch.randn(2, 3, 48, 2, size)
    chunk = vllm_cpu_chunk(kv, layout)
    assert torch.equal(layout.view(chunk), kv)
    found = torch.empty(2, 3, 48, 2 * size)
    copy_all(layout.decode(chunk.flatten(), found))
    assert torch.equal(found, kv.flatten(3))
    one = torch.empty(2, 1, 48, 2 * size)
    copy_all(layout.decode(chunk, one, Part(layers=slice(1, 2))))
    assert torch.equal(one, found[:, 1:2])
    back = torch.empty_like(chunk)
    copy_all(layout.encode(found, back))
    assert torch.equal(back, chunk)
    with pytest.raises(GeometryMismatch, match="whole blocks of 16"):
        copy_all(layout.decode(chunk.flatten()[: chunk.numel() // 2], torch.empty(2, 3, 24, 2 * size)))


@pytest.mark.parametrize("block", [None, 0, 12, 7])
def test_vllm_cpu_needs_a_block_size_it_can_express(block):
    with pytest.raises(InvalidRequest, match="needs block_size"):
        KVLayout(3, 2, 8, torch.float32, "vllm-cpu", block_size=block)


def test_a_block_size_survives_json():
    layout = KVLayout(3, 2, 8, torch.float32, "vllm-cpu", block_size=32)
    assert KVLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert layout.with_packing("split") == KVLayout(3, 2, 8, torch.float32)
