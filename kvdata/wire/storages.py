"""Reading one serialised storage: the bytes of a tensor behind a header of five small pickles.

This is what ``torch.save`` wrote before it wrote archives, and what a pickled tensor still carries. PyTorch's own
reader allocates what the header claims, and takes archives too, whose compressed parts unpack to a thousand times their
size. Here the header must claim just what was asked for, and the bytes must be there.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch

from kvdata.errors import UnsafePayload
from kvdata.wire.pickles import PLAIN, check_opcodes

HEADER_BYTES = 4096  # it has about 250
_HEADER_OPCODES = 64  # each of its pickles has at most 25
_IN_HEADER = PLAIN | {"SETITEMS", "BINPERSID"}
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_COUNT_BYTES = 8

_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
}


class Storage(NamedTuple):
    """Elements of one dtype, ``[numel]``, in memory of their own."""

    elements: torch.Tensor


def read_storage(data: object, dtype: torch.dtype, numel: int) -> Storage:
    """A serialised CPU storage of ``numel`` elements of ``dtype``; `UnsafePayload` for anything else."""
    size = numel * dtype.itemsize
    if not isinstance(data, bytes) or not 0 <= len(data) - size - _COUNT_BYTES <= HEADER_BYTES:
        raise UnsafePayload("payload holds a storage that is larger or smaller than a chunk")
    count = data[-size - _COUNT_BYTES : -size]
    _check_header(data[: -size - _COUNT_BYTES], dtype, numel)
    if int.from_bytes(count, "little") != numel:
        raise UnsafePayload("payload holds a storage with another number of elements than it says")
    return Storage(torch.frombuffer(bytearray(memoryview(data)[-size:]), dtype=dtype))


def _check_header(header: bytes, dtype: torch.dtype, numel: int) -> None:
    pickles = io.BytesIO(header)
    magic, version, machine, storage, keys = (_load(pickles) for _ in range(5))
    if (magic, version) != (_MAGIC, _VERSION) or pickles.read(1) or machine.get("little_endian") is not True:
        raise UnsafePayload("payload holds a storage of another format")
    kind, stored, key, location, claimed, view = storage
    if (kind, stored, location, claimed, view) != ("storage", dtype, "cpu", numel, None) or keys != [key]:
        raise UnsafePayload(f"payload holds a storage that is not {numel} elements of {dtype} on the CPU")


def _load(pickles: io.BytesIO) -> Any:
    start = pickles.tell()
    check_opcodes(pickles, _IN_HEADER, _HEADER_OPCODES)
    pickles.seek(start)
    return _Unpickler(pickles).load()


class _Unpickler(pickle.Unpickler):
    """Knows the names of storages, which become dtypes, and calls nothing: the opcodes for that are refused."""

    def find_class(self, module: str, name: str) -> torch.dtype:
        dtype = _DTYPES.get(name)
        if module != "torch" or dtype is None:
            raise UnsafePayload("payload holds a storage of a kind that is none of tensors")
        return dtype

    def persistent_load(self, pid: Any) -> Any:
        return pid
