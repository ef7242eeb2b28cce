"""Tensor payloads of pickle transfer, read without trusting the sender.

A payload is a pickle of a list of CPU tensors, one per chunk. Reading goes through an unpickler that knows
three names and nothing else, and rebuilds tensors itself: dtype, size and extent are checked before a
tensor exists.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from kvdata.errors import UnsafePayload
from kvdata.wire.pickles import PLAIN, check_opcodes
from kvdata.wire.storages import HEADER_BYTES, Storage, read_storage

_IN_PAYLOAD = PLAIN | {"REDUCE"}
_OPCODES_PER_TENSOR = 64  # a tensor takes 45 at most
_SHOWN = 80  # characters of what a stranger sent


def dumps(chunks: Sequence[torch.Tensor]) -> bytes:
    """Pickle of a list of chunks. Each is cloned first: a view would drag its whole storage along."""
    return pickle.dumps([chunk.detach().clone(memory_format=torch.contiguous_format) for chunk in chunks], 4)


def loads(data: bytes, dtype: torch.dtype, numel: int, count: int) -> list[torch.Tensor]:
    """The ``count`` tensors of a payload, each of ``numel`` elements of ``dtype``.

    Raises `UnsafePayload` when the payload names any global besides torch's tensor rebuilding, or holds
    anything but contiguous plain CPU tensors of the expected number, dtype and size.
    """
    limit = count * (numel * dtype.itemsize + HEADER_BYTES) + HEADER_BYTES
    if len(data) > limit:
        raise UnsafePayload(f"payload of {len(data)} bytes where at most {limit} can be expected")
    try:
        check_opcodes(data, _IN_PAYLOAD, _OPCODES_PER_TENSOR * (count + 1))
        chunks = _Unpickler(io.BytesIO(data), dtype, numel, count).load()
    except UnsafePayload:
        raise
    except Exception as exc:  # a hostile or broken pickle can raise anything
        raise UnsafePayload(f"payload is not a readable list of tensors: {type(exc).__name__}") from exc
    if type(chunks) is not list or len(chunks) != count or any(type(c) is not torch.Tensor for c in chunks):
        raise UnsafePayload(f"payload is not a list of {count} tensors")
    return chunks


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, dtype: torch.dtype, numel: int, count: int) -> None:
        super().__init__(file)
        self._dtype = dtype
        self._numel = numel
        self._left = count  # storages that may still come: the same bytes can be asked for again and again

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "torch.storage", "_load_from_bytes":
                return self._load_storage
            case "torch._utils", "_rebuild_tensor_v2":
                return self._rebuild_tensor
            case "collections", "OrderedDict":
                return OrderedDict
        raise UnsafePayload(f"payload asks for {f'{module}.{name}'[:_SHOWN]!r}; only plain tensors are admitted")

    def _load_storage(self, data: object) -> Storage:
        self._left -= 1
        if self._left < 0:
            raise UnsafePayload("payload holds more storages than chunks")
        return read_storage(data, self._dtype, self._numel)

    def _rebuild_tensor(
        self, storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, *_hooks: Any
    ) -> torch.Tensor:
        plain = type(storage) is Storage and type(offset) is int and offset == 0 and requires_grad is False
        if not plain or type(size) is not tuple or any(type(length) is not int or length < 1 for length in size):
            raise UnsafePayload("payload holds a malformed tensor")
        if math.prod(size) != self._numel or stride != torch.empty(size, device="meta").stride():
            raise UnsafePayload(f"payload holds a tensor that is not {self._numel} contiguous elements of its storage")
        elements: torch.Tensor = storage.elements
        return elements.view(size)
