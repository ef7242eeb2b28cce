"""Pickles of strangers are read without running, believing or allocating what they say, on both sides."""

from __future__ import annotations

import pickle
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdata.errors import UnsafePayload
from kvdata.wire import tensors
from tests.unit import hostile
from tests.unit.hostile import CORPUS, DTYPE, NUMEL


@contextmanager
def little_memory(room: int = 256 << 20) -> Iterator[None]:
    """Only so many bytes more may be mapped inside."""
    _, before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, before))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, before))


def read(payload: bytes, count: int = 1) -> list[torch.Tensor]:
    return tensors.loads(payload, DTYPE, NUMEL, count)


def test_the_corpus_bites():
    """Pickle itself runs what would leave a mark: a corpus that harms nobody would prove nothing."""
    calling = [payload for payload in CORPUS.values() if b"tests.unit.hostile" in payload]
    assert sum(hostile.unpickled_by(pickle.loads, payload) for payload in calling) >= 8


@pytest.mark.parametrize("payload", CORPUS.values(), ids=CORPUS)
def test_hostile_pickles_are_refused_and_run_nothing(payload):
    hostile.tripped.clear()
    with little_memory(), pytest.raises(UnsafePayload) as caught:
        read(payload)
    assert not hostile.tripped
    assert len(str(caught.value)) < 300  # and do not write the log


NEEDLESS = {
    "INST": b"(itests.unit.hostile\ntrip\n", "OBJ": b"(" + hostile.TRIP + b"o", "NEWOBJ": hostile.TRIP + b")\x81",
    "NEWOBJ_EX": hostile.TRIP + b")}\x92", "BUILD": b"]}b", "EXT1": b"\x82\x01", "PERSID": b"Px\n", "DICT": b"(d",
    "BINPERSID": hostile.text("x") + b"Q", "NEXT_BUFFER": b"\x97", "BYTEARRAY8": b"\x96\x01" + bytes(7) + b"x",
    "LONG4": b"\x8b\x01\0\0\0\x01", "UNICODE": b"Vx\n", "INT": b"I1\n", "PUT": b"]p9\n", "DUP": b"]2", "POP": b"]]0",
    "EMPTY_SET": b"\x8f", "BINUNICODE8": b"\x8d\x01" + bytes(7) + b"x", "FLOAT": b"F1\n", "SETITEM": b"}]]s",
    "LONG_BINPUT": b"]r" + (1 << 20).to_bytes(4, "little"),  # at a place far beyond the memo
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDLESS)
def test_opcodes_that_no_tensor_needs_are_refused_before_the_first_is_run(name):
    payload = hostile.whole(b"](" + hostile.tensor() + NEEDLESS[name] + b"e")
    with pytest.raises(UnsafePayload, match=f"the pickle opcode {name};"):
        read(payload)


@pytest.mark.parametrize("payload", ["one storage twenty times", "one storage a thousand times"])
def test_no_more_storages_are_made_than_chunks_are_expected(payload):
    with pytest.raises(UnsafePayload, match=r"more storages|opcodes"):
        read(CORPUS[payload])


@pytest.mark.parametrize("storage", [b"", hostile.STORAGE[: 4 * NUMEL], bytes(5000) + hostile.STORAGE])
def test_the_size_of_a_storage_is_compared_before_its_header_is_read(storage):
    with pytest.raises(UnsafePayload, match="larger or smaller than a chunk"):
        tensors.loads(hostile.whole(b"](" + hostile.tensor(storage) + b"N" * 20 + b"e"), DTYPE, NUMEL, 3)


@pytest.mark.parametrize("size", ["a size of 2**2000", "a size of 2**62 by 2**62", "no size"])
def test_a_size_is_compared_before_a_tensor_of_it_exists(size):
    with pytest.raises(UnsafePayload, match="24 contiguous elements"):
        read(CORPUS[size])


@given(st.lists(st.sampled_from(sorted(set(hostile.fragments()))), max_size=30))
@settings(max_examples=400)
def test_programs_of_such_pieces_are_refused_or_a_list_of_tensors(pieces):
    hostile.tripped.clear()
    for payload in (
        hostile.whole(b"".join(pieces)),
        hostile.one(b"".join(pieces)),
        hostile.in_header(b"".join(pieces)),
    ):
        try:
            found = read(payload)
        except UnsafePayload:
            continue
        assert [(chunk.dtype, chunk.numel(), chunk.device.type) for chunk in found] == [(DTYPE, NUMEL, "cpu")]
    assert not hostile.tripped


VALID = tensors.dumps([torch.arange(float(NUMEL))])


@given(st.data(), st.integers(0, len(VALID)), st.integers(0, 40))
@settings(max_examples=300)
def test_a_payload_with_a_part_replaced_is_refused_or_harmless(data, start, length):
    piece = data.draw(st.one_of(st.binary(max_size=40), st.sampled_from(sorted(set(hostile.fragments())))))
    hostile.tripped.clear()
    try:
        found = read(VALID[:start] + piece + VALID[start + length :])
    except UnsafePayload:
        pass
    else:
        assert [(chunk.dtype, chunk.numel()) for chunk in found] == [(DTYPE, NUMEL)]
    assert not hostile.tripped


def test_a_flood_of_opcodes_costs_nothing():
    """Of the size of its chunk, it would keep an unbounded reader busy for a minute, in four hundred times its size."""
    flood = hostile.whole(b"](" + b"]" * (32 << 20) + b"e")
    started = time.process_time()
    with little_memory(), pytest.raises(UnsafePayload, match="opcodes"):
        tensors.loads(flood, DTYPE, 16 << 20, 1)
    assert time.process_time() - started < 2.0


def test_what_is_returned_shares_no_memory_with_the_payload():
    payload = bytearray(tensors.dumps([torch.ones(NUMEL), torch.ones(NUMEL)]))
    first, second = read(bytes(payload), 2)
    first.zero_()
    assert torch.equal(second, torch.ones(NUMEL))
    assert first.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64])
def test_other_plain_dtypes_are_read(dtype):
    chunk = torch.arange(NUMEL).to(dtype).view(2, 3, 4)
    assert torch.equal(tensors.loads(tensors.dumps([chunk]), dtype, NUMEL, 1)[0], chunk)
