"""Keys, operation numbers and tensor payloads of the protocol."""

from __future__ import annotations

import os
import pickle
import resource
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvdata.errors import InvalidRequest, UnsafePayload
from kvdata.wire import tensors
from kvdata.wire.keys import NONE_HASH, check_salt, chunk_hashes, kv_rank, token_list
from kvdata.wire.messages import NEWEST, CacheKey, operation_numbers, parse_release
from kvdata.wire.shm import POOL_PREFIX, MappedPool, pool_path


def test_chunk_hashes_chain_over_big_endian_tokens():
    assert NONE_HASH.hex() == "7e3eff9ef7613a50340eb12677ee03b83ac759fcba9bb32705f07248d56d473b"
    first = blake3(NONE_HASH + struct.pack(">2I", 1, 2**32 - 1)).digest()
    second = blake3(first + struct.pack(">2I", 3, 4)).digest()
    assert chunk_hashes([1, 2**32 - 1, 3, 4, 5], 2) == [first, second]
    assert chunk_hashes([1], 2) == []


def test_kv_rank_of_one_and_several_shards():
    assert kv_rank(1, 0) == 16777472
    assert kv_rank(2, 1) == 0x02010201


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_of_every_kind_become_plain_ints(ids):
    for given_as in (ids, tuple(ids), np.array(ids, dtype=np.uint32), torch.tensor(ids, dtype=torch.int64)):
        found = token_list(given_as)
        assert found == ids
        assert all(type(token) is int for token in found)


@pytest.mark.parametrize(
    "bad", [[1.0], [True], [None], ["a"], [-1], [2**32], [2**70], [[1]], [[1], [2, 3]], "12", b"12", 5, None, {1}]
)
def test_other_token_ids_are_refused(bad):
    with pytest.raises(InvalidRequest):
        token_list(bad)


def test_salts_may_be_128_characters_of_anything_but_separators():
    check_salt("ä" * 128)
    check_salt("a b#c:d,\n")
    for bad in ("x" * 129, "@", "/", "\\", "\0", "\ud800", 3):
        with pytest.raises(InvalidRequest):
            check_salt(bad)


@pytest.mark.parametrize(
    ("version", "lookup", "commit_retrieve", "noop"),
    [
        ("0.4.7", 5, 15, 20),
        ("0.5.0", 5, 16, 21),
        ("0.5.2.post1", 5, 16, 21),
        ("0.5.3", 8, 19, 24),
        ("0.5.6", 8, 19, 24),
        ("0.9.0.dev1+gabc", 8, 19, 24),
    ],
)
def test_operation_numbers_by_release(version, lookup, commit_retrieve, noop):
    numbers = operation_numbers(parse_release(version))
    assert (numbers["lookup"], numbers["commit_retrieve"], numbers["noop"]) == (lookup, commit_retrieve, noop)
    assert len(set(numbers.values())) == len(numbers)


def test_a_release_must_have_a_number():
    with pytest.raises(ValueError, match="no release number"):
        parse_release("unknown")
    with pytest.raises(ValueError, match="no operation table"):
        operation_numbers((0, 3, 0))
    assert parse_release("v0.6") == (0, 6, 0)
    assert NEWEST == (0, 5, 6)


def test_a_key_travels_as_a_map_of_its_field_names():
    key = CacheKey("m", 1, None, [1, 2], 0, 2, "r")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(key)) == {
        "model_name": "m",
        "world_size": 1,
        "worker_id": None,
        "token_ids": [1, 2],
        "start": 0,
        "end": 2,
        "request_id": "r",
        "cache_salt": "",
        "request_configs": None,
        "num_kv_readers": 1,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_payloads_round_trip(dtype):
    chunks = [torch.randn(2, 3, 4).to(dtype), torch.randn(100, 4).to(dtype)[50:56].view(2, 3, 4)]
    payload = tensors.dumps(chunks)
    found = tensors.loads(payload, dtype, 24, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, chunks, strict=True))
    assert len(payload) < 24 * 4 * 2 + 2048  # a view does not drag its storage along


class _Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def _tensor(numel: int = 24, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


class _Rebuilds:
    """Asks for a tensor with a view outside its storage."""

    def __init__(self, offset: object, size: object, stride: object) -> None:
        self.args = (torch.zeros(24)._typed_storage(), offset, size, stride, False, {})

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.args


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "hostile",
    [
        lambda folder: [_Runs(f"touch {folder}/owned")],
        lambda folder: [_tensor(), _Runs(f"touch {folder}/owned")],
        lambda folder: {"chunk": _tensor()},
        lambda folder: [_tensor(), _tensor()],
        lambda folder: [],
        lambda folder: [1],
        lambda folder: [_tensor(23)],
        lambda folder: [_tensor(25)],
        lambda folder: [_tensor(24, torch.int32)],
        lambda folder: [_tensor(24, torch.float64)],
        lambda folder: [_tensor(48)[::2]],
        lambda folder: [_tensor().requires_grad_()],
        lambda folder: [torch.nn.Parameter(_tensor())],
        lambda folder: [_Rebuilds(1, (24,), (1,))],
        lambda folder: [_Rebuilds(0, (2**40,), (1,))],
        lambda folder: [_Rebuilds(0, (-24,), (1,))],
        lambda folder: [_Rebuilds(0, (24,), (2,))],
        lambda folder: [_Rebuilds(0, (24,), (0,))],
        lambda folder: [_Rebuilds("0", (24,), (1,))],
        lambda folder: [_Rebuilds(0, "x", (1,))],
        lambda folder: [torch.zeros(24).numpy()],
    ],
)
def test_hostile_payloads_are_refused_and_run_nothing(hostile, tmp_path):
    payload = pickle.dumps(hostile(tmp_path), 4)
    with pytest.raises(UnsafePayload):
        tensors.loads(payload, torch.float32, 24, 1)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "greedy",
    [
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.",  # BYTEARRAY8 of a terabyte
        b"\x80\x04]r" + (1 << 31).to_bytes(4, "little") + b".",  # a memo of 2**31 entries
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",  # BINBYTES8 of a terabyte
        b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"].",  # a frame of a terabyte
    ],
)
def test_payloads_that_only_claim_to_be_large_allocate_nothing(greedy):
    _, before = resource.getrlimit(resource.RLIMIT_AS)
    room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (room, before))
    try:
        with pytest.raises(UnsafePayload):
            tensors.loads(greedy, torch.float32, 24, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, before))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    with pytest.raises(UnsafePayload):
        tensors.loads(data, torch.float32, 24, 1)


PAYLOAD = tensors.dumps([torch.arange(24.0)])


@given(st.integers(0, len(PAYLOAD) - 1), st.integers(0, 255))
def test_a_damaged_payload_is_refused_or_harmless(position, value):
    """Any one byte changed: either refused, or a list of tensors of the right kind (other values)."""
    payload = bytearray(PAYLOAD)
    payload[position] = value
    try:
        found = tensors.loads(bytes(payload), torch.float32, 24, 1)
    except UnsafePayload:
        return
    assert [(chunk.numel(), chunk.dtype) for chunk in found] == [(24, torch.float32)]


def test_a_payload_larger_than_expected_is_not_even_read():
    with pytest.raises(UnsafePayload, match="at most"):
        tensors.loads(bytes(100_000), torch.float32, 24, 1)


@pytest.mark.parametrize(
    "name",
    [
        *("../etc/passwd", "a/b", "", ".", "..", "x\0y", "torch_123", "sem.x", POOL_PREFIX, f"x{POOL_PREFIX}a"),
        *(POOL_PREFIX + end for end in ("../x", "a/b", "a\0", "a\n", "a" * 201)),
    ],
)
def test_pool_names_are_names_of_pools_and_cannot_leave_the_folder(name):
    with pytest.raises(ValueError, match="not the name of a shared-memory pool"):
        pool_path(name)


def test_a_pool_is_mapped_within_its_bounds_and_knows_its_successor(tmp_path, monkeypatch):
    monkeypatch.setattr("kvdata.wire.shm.SHM_FOLDER", tmp_path)
    name = f"{POOL_PREFIX}test"
    (tmp_path / name).write_bytes(bytes(8192))
    pool = MappedPool(name, 8192)
    pool.view(4096, 4, torch.float32)[0] = 1.5
    assert struct.unpack("f", (tmp_path / name).read_bytes()[4096:4100]) == (1.5,)
    for offset, length in ((-1, 4), (8190, 4), (0, 0), (0, -4), (0, 6), (2, 4), (2**62, 4), (4, 2**62), (2**70, 2**70)):
        with pytest.raises(ValueError, match="do not lie"):
            pool.view(offset, length, torch.float32)
    assert pool.is_current()
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(bytes(8192))
    assert not pool.is_current()
    pool.close()
    with pytest.raises(OSError, match="reported"):
        MappedPool(name, 9000)
