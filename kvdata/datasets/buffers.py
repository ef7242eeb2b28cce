"""Batch buffers that are used again.

Writing into memory that was never touched costs a page fault for every 4 KiB, several times the copy itself. A buffer
is free again when no tensor sees it any more, so that a batch stays valid for as long as anybody holds it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import torch

# Gives the buffer of a batch: shape and dtype -> an uninitialised CPU tensor.
Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class Buffers:
    """Hands out batch buffers, and takes each back when the last tensor on it is gone. Thread-safe.

    Args:
        keep: free buffers to hold on to.
        pinned: page-locked memory, for copies to a GPU.
    """

    def __init__(self, keep: int = 2, pinned: bool = False) -> None:
        self._keep = keep
        self._pinned = pinned
        self._free: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._lock = threading.Lock()

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        size = math.prod(shape) * dtype.itemsize
        memory = self._take(size)
        view = memory.numpy()[:size]
        weakref.finalize(view, self._give_back, memory).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def _take(self, size: int) -> torch.Tensor:
        with self._lock:
            for _ in range(len(self._free)):
                memory, copied = self._free.popleft()
                if memory.numel() >= size:
                    if copied is not None:
                        copied.synchronize()
                    return memory
                del memory  # too small for what is read now: a larger one takes its place
        return torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=self._pinned)

    def _give_back(self, memory: torch.Tensor) -> None:
        # May run inside a garbage collection of any thread: no lock, and a deque's append needs none.
        if len(self._free) < self._keep:
            copied = None
            if self._pinned:  # an asynchronous copy to the GPU may still read it
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
            self._free.append((memory, copied))
