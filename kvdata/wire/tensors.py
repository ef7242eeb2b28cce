"""Tensor payloads of pickle transfer, read without trusting the sender.

A payload is a pickle of a list of CPU tensors, one per chunk. Reading goes through an unpickler that knows
three names and nothing else, and rebuilds tensors itself: dtype, size and extent are checked before a
tensor exists.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from kvdata.errors import UnsafePayload

# A serialised storage is its bytes plus a header of a few hundred; anything much larger is not what we asked for.
_HEADER_ALLOWANCE = 4096

# All that a pickled list of tensors consists of. The others are refused before anything is unpickled: some make
# pickle allocate what a length or an index in the payload says (BYTEARRAY8, a PUT far beyond the memo).
_OPCODES = frozenset(
    """
    PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET EMPTY_LIST APPEND APPENDS EMPTY_TUPLE
    TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINUNICODE
    SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINBYTES8 GLOBAL STACK_GLOBAL REDUCE
    """.split()  # noqa: SIM905 - a list of strings would take forty lines
)
_MEMO_LIMIT = 1 << 20


def dumps(chunks: Sequence[torch.Tensor]) -> bytes:
    """Pickle of a list of chunks. Each is cloned first: a view would drag its whole storage along."""
    return pickle.dumps([chunk.detach().clone(memory_format=torch.contiguous_format) for chunk in chunks], 4)


def loads(data: bytes, dtype: torch.dtype, numel: int, count: int) -> list[torch.Tensor]:
    """The ``count`` tensors of a payload, each of ``numel`` elements of ``dtype``.

    Raises `UnsafePayload` when the payload names any global besides torch's tensor rebuilding, or holds
    anything but contiguous plain CPU tensors of the expected number, dtype and size.
    """
    limit = count * (numel * dtype.itemsize + _HEADER_ALLOWANCE) + _HEADER_ALLOWANCE
    if len(data) > limit:
        raise UnsafePayload(f"payload of {len(data)} bytes where at most {limit} can be expected")
    try:
        _check_opcodes(data)
        chunks = _Unpickler(io.BytesIO(data), dtype, numel).load()
    except UnsafePayload:
        raise
    except Exception as exc:  # a hostile or broken pickle can raise anything
        raise UnsafePayload(f"payload is not a readable list of tensors: {type(exc).__name__}") from exc
    if type(chunks) is not list or len(chunks) != count or any(type(c) is not torch.Tensor for c in chunks):
        raise UnsafePayload(f"payload is not a list of {count} tensors")
    return chunks


def _check_opcodes(data: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES or (opcode.name == "LONG_BINPUT" and int(argument or 0) > _MEMO_LIMIT):
            raise UnsafePayload(f"payload uses the pickle opcode {opcode.name}; a list of tensors does not")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, dtype: torch.dtype, numel: int) -> None:
        super().__init__(file)
        self._dtype = dtype
        self._numel = numel

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "torch.storage", "_load_from_bytes":
                return self._load_storage
            case "torch._utils", "_rebuild_tensor_v2":
                return self._rebuild_tensor
            case "collections", "OrderedDict":
                return OrderedDict
        raise UnsafePayload(f"payload asks for {module}.{name}; only plain tensors are admitted")

    def _load_storage(self, data: bytes) -> torch.storage.TypedStorage:
        if not isinstance(data, bytes) or len(data) > self._numel * self._dtype.itemsize + _HEADER_ALLOWANCE:
            raise UnsafePayload("payload holds a storage larger than a chunk")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces the end of TypedStorage on each use
            storage = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(storage, torch.storage.TypedStorage):
            raise UnsafePayload("payload holds something else where a storage belongs")
        return storage

    def _rebuild_tensor(
        self, storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, *_hooks: Any
    ) -> torch.Tensor:
        if not isinstance(storage, torch.storage.TypedStorage) or type(offset) is not int:
            raise UnsafePayload("payload holds a malformed tensor")
        plain = torch.empty(0, dtype=self._dtype)
        numel = 1
        for length in size:
            if type(length) is not int or length < 1:
                raise UnsafePayload("payload holds a tensor of impossible size")
            numel *= length
        contiguous = torch.empty(tuple(size), device="meta").stride() if numel == self._numel else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            untyped: torch.UntypedStorage = storage._untyped_storage
            fits = offset == 0 and storage.dtype == self._dtype
        fits = fits and untyped.nbytes() == self._numel * self._dtype.itemsize
        if not fits or contiguous != tuple(stride) or requires_grad:
            raise UnsafePayload(
                f"payload holds a tensor of {tuple(size)} that is not {self._numel} elements of {self._dtype}"
            )
        return plain.set_(untyped, 0, tuple(size), tuple(stride))
