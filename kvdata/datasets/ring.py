"""Batches from a DataLoader's worker without a copy: in buffers that worker and parent both have mapped.

A worker writes a batch into a free buffer of its ring and queues the buffer's number; the parent maps a buffer when it
first hears of it. The buffer is free again when the parent's last tensor on it is gone. With all buffers in use, the
batch travels as any tensor does: copied once more.

Memory is of ``memfd_create``: it has no name that could be left behind, and goes with its last user.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import secrets
import weakref
from multiprocessing import reduction
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch

# Two that are prefetched, one being filled, and those in the consumer's hands.
RING_BUFFERS = 6

# State byte behind a buffer's data. Only the worker leaves FREE and USED, only the parent leaves SENT.
_FREE, _USED, _SENT = 0, 1, 2


class _Memory:
    """A mapped ``memfd``: data, and one page more for its state."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(fd, size + mmap.PAGESIZE)
        self.address = self.array().ctypes.data

    @property
    def state(self) -> int:
        return self._map[self.size]

    @state.setter
    def state(self, value: int) -> None:
        self._map[self.size] = value

    @property
    def known(self) -> bool:
        """The parent has mapped it."""
        return bool(self._map[self.size + 1])

    @known.setter
    def known(self, value: bool) -> None:
        self._map[self.size + 1] = value

    def array(self) -> np.ndarray:
        """Its data as an array of its own, whose end can be watched."""
        return np.frombuffer(self._map, np.uint8, self.size)

    def discard(self) -> None:
        """Give the pages back to the system, whoever has it mapped."""
        self._map.madvise(mmap.MADV_REMOVE, 0, self.size)


class _Buffer(_Memory):
    """One buffer of a worker's ring."""

    def __init__(self, number: int, size: int) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.number = number
        self.uses = 0
        self.fd = os.memfd_create("kvdata-batch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size + mmap.PAGESIZE)
            super().__init__(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise

    def free_unless_sent(self, use: int) -> None:
        """The worker's last tensor of one use is gone."""
        if self.uses == use and self.state == _USED:
            self.state = _FREE

    def close(self) -> None:
        if self.state == _FREE:
            self.discard()
        os.close(self.fd)


class Ring:
    """A worker's buffers. Calling it hands one out, as `Buffers` does."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._token = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._buffers: list[_Buffer] = []
        Finalize(self, self._close, exitpriority=10)  # atexit does not run in workers

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        size = math.prod(shape) * dtype.itemsize
        buffer = self._take(size)
        if buffer is None:
            return torch.empty(shape, dtype=dtype)
        buffer.state = _USED
        buffer.uses += 1
        array = buffer.array()
        weakref.finalize(array, buffer.free_unless_sent, buffer.uses).atexit = False
        return torch.from_numpy(array)[:size].view(dtype).view(shape)

    def send(self, kv: torch.Tensor) -> tuple[Any, ...] | None:
        """What the parent needs for `receive` of a tensor; None when it does not lie in this ring."""
        place = kv.untyped_storage().data_ptr()
        buffer = next((b for b in self._buffers if b.state == _USED and b.address == place), None)
        if buffer is None:
            return None
        buffer.state = _SENT
        handle = None if buffer.known else reduction.DupFd(buffer.fd)
        name = (self.pid, self._token, buffer.number)
        return name, handle, buffer.size, kv.dtype, tuple(kv.shape), kv.stride(), kv.storage_offset()

    def _take(self, size: int) -> _Buffer | None:
        free = [b for b in self._buffers if b.state == _FREE]
        for buffer in free:
            if buffer.size >= size:
                return buffer
        if free:  # too small for what is read now: a larger one takes its place
            free[0].close()
            self._buffers.remove(free[0])
        if len(self._buffers) >= RING_BUFFERS:
            return None
        self._buffers.append(_Buffer(next(self._numbers), max(size, 1)))
        return self._buffers[-1]

    def _close(self) -> None:
        while self._buffers:
            self._buffers.pop().close()


_ring: Ring | None = None


def worker_ring() -> Ring:
    """The ring of this DataLoader worker."""
    global _ring
    if _ring is None or _ring.pid != os.getpid():
        _ring = Ring()
    return _ring


def send(kv: torch.Tensor) -> tuple[Any, ...] | None:
    """Arguments for `receive` in the parent; None when the tensor does not lie in this worker's ring."""
    return _ring.send(kv) if _ring is not None and _ring.pid == os.getpid() else None


class _Received(_Memory):
    """A worker's buffer, mapped in the parent."""

    in_use = False

    def release(self) -> None:
        """The parent's last tensor on it is gone."""
        self.in_use = False
        self.state = _FREE
        _forget_ended()


_received: dict[tuple[int, str, int], _Received] = {}


def receive(
    name: tuple[int, str, int],
    handle: Any,
    size: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> torch.Tensor:
    """The tensor of a worker's `Ring.send`, over the same memory."""
    if handle is not None:
        fd = handle.detach()
        try:
            _received[name] = _Received(fd, size)
            _received[name].known = True
        finally:
            os.close(fd)
    memory = _received[name]
    memory.in_use = True
    array = memory.array()
    weakref.finalize(array, memory.release).atexit = False
    return torch.as_strided(torch.from_numpy(array).view(dtype), shape, stride, offset)


def _forget_ended() -> None:
    """Unmap the buffers of workers that have ended, but for those still in use.

    A DataLoader ends its workers when it has taken all that they sent, or will not take it any more.
    """
    for name, memory in list(_received.items()):
        if not memory.in_use:
            try:
                os.kill(name[0], 0)
            except ProcessLookupError:
                _received.pop(name, None)
