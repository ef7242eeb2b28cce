"""Packings of random geometries: a chunk is a permutation of its KV, read as it was written, in whole and in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdata import KVLayout
from kvdata.client.copying import copy_all
from kvdata.errors import GeometryMismatch, InvalidRequest
from kvdata.layout import DTYPES, PACKINGS, Part

WORDS = {2: torch.int16, 4: torch.int32}


@st.composite
def geometries(draw: st.DrawFn) -> tuple[KVLayout, int]:
    """A layout and the tokens of its chunks."""
    packing = draw(st.sampled_from(PACKINGS))
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    size, block = draw(st.sampled_from([1, 2, 3, 4, 5, 8])), None
    if packing == "vllm-cpu":
        block = draw(st.sampled_from([n for n in range(2, 33, 2) if n % (2 * size) == 0 or 2 * size % n == 0]))
    elif packing == "vllm-cpu-amx":
        size, block = draw(st.sampled_from([(16, 32), (16, 64), (32, 32), (48, 96), (64, 32), (128, 64)]))
    tokens = (block or draw(st.integers(1, 7))) * draw(st.integers(1, 3))
    return KVLayout(layers, heads, size, dtype, packing, block), tokens


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(WORDS[tensor.dtype.itemsize])


def any_kv(layout: KVLayout, tokens: int, seed: int) -> torch.Tensor:
    """Random bits, with every kind of NaN among them: nothing may be computed with what is only moved."""
    words = WORDS[layout.dtype.itemsize]
    info, generator = torch.iinfo(words), torch.Generator().manual_seed(seed)
    shape = (2, layout.num_layers, tokens, layout.hidden)
    return torch.randint(info.min, info.max, shape, dtype=words, generator=generator).view(layout.dtype)


@given(geometries(), st.integers(0, 2**32))
@settings(max_examples=100)
def test_what_is_written_is_read_bit_for_bit(geometry, seed):
    layout, tokens = geometry
    kv = any_kv(layout, tokens, seed)
    chunk = torch.zeros(layout.chunk_shape(tokens), dtype=layout.dtype)
    copy_all(layout.encode(kv, chunk))
    assert torch.equal(bits(layout.view(chunk).flatten(3)), bits(kv))
    back = torch.empty_like(kv)
    copy_all(layout.decode(chunk.flatten(), back))
    assert torch.equal(bits(back), bits(kv))
    assert torch.equal(bits(chunk).flatten().sort().values, bits(kv).flatten().sort().values)


@given(geometries(), st.data())
@settings(max_examples=100)
def test_a_part_is_that_part_of_the_whole(geometry, data):
    layout, tokens = geometry
    kv = any_kv(layout, tokens, 0)
    chunk = torch.zeros(layout.chunk_shape(tokens), dtype=layout.dtype)
    copy_all(layout.encode(kv, chunk))

    def within(length: int) -> slice:
        start = data.draw(st.integers(0, length - 1))
        return slice(start, data.draw(st.integers(start + 1, length)))

    part = Part(within(2), within(layout.num_layers), within(tokens), within(layout.num_kv_heads))
    wanted = layout.heads(kv)[part]
    out = torch.empty(*wanted.shape[:3], wanted.shape[3] * layout.head_dim, dtype=layout.dtype)
    copy_all(layout.decode(chunk, out, part))
    assert torch.equal(bits(out), bits(wanted.flatten(3)))


@given(geometries(), st.integers(-40, 40))
def test_a_chunk_of_another_size_is_refused(geometry, more):
    layout, tokens = geometry
    whole = torch.zeros(layout.chunk_shape(tokens), dtype=layout.dtype).numel()
    if whole + more <= 0 or (whole + more) % (2 * layout.num_layers * layout.hidden * (layout.block_size or 1)) == 0:
        return
    with pytest.raises(GeometryMismatch):
        layout.view(torch.zeros(whole + more, dtype=layout.dtype))


@given(geometries(), st.integers(1, 3))
def test_shards_together_are_the_whole(geometry, world_size):
    layout, _ = geometry
    if layout.num_kv_heads % world_size:
        with pytest.raises(GeometryMismatch):
            layout.shard(world_size)
        return
    shard = layout.shard(world_size)
    assert shard.token_bytes * world_size == layout.token_bytes
    assert KVLayout.from_dict(layout.to_dict()) == layout


JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)
FIELDS = ["num_layers", "num_kv_heads", "head_dim", "dtype", "packing", "block_size"]


@given(
    geometries(),
    st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3),
    st.sets(st.sampled_from(FIELDS), max_size=1),
)
@settings(max_examples=200)
def test_a_layout_from_a_file_or_server_is_one_or_a_typed_error(geometry, changes, removed):
    layout, _ = geometry
    data = {**layout.to_dict(), **changes}
    for field in removed:
        data.pop(field, None)
    try:
        found = KVLayout.from_dict(data)
    except InvalidRequest:
        return
    assert KVLayout.from_dict(found.to_dict()) == found
    assert found.token_bytes > 0


@given(JUNK)
def test_what_is_no_mapping_is_no_layout(junk):
    with pytest.raises(InvalidRequest):
        KVLayout.from_dict(junk)
