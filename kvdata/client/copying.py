"""Copies between memory of the same kind, on several threads.

PyTorch's own copies are as fast, but its threads meet after each of them, and then wait actively for the next: beside
a server on the same cores that delays the server's answers, and a copy whenever one thread is kept waiting. Here each
thread takes the next piece when it is done with its last.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

Pair = tuple[torch.Tensor, torch.Tensor]  # destination and source of one shape

# Small enough to share out evenly, large enough that a piece's overhead (about 10 us) does not count.
_PIECE_BYTES = 16 << 20
_WORDS = {2: torch.int16, 4: torch.int32}


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copy each source to its destination, on as many threads as PyTorch may use here; dtypes may differ."""
    pieces: deque[tuple[np.ndarray, np.ndarray]] = deque()
    for destination, source in pairs:
        if destination.dtype == source.dtype:
            pieces += zip(_pieces(destination), _pieces(source), strict=True)
        else:
            destination.copy_(source)
    helpers = min(torch.get_num_threads(), len(pieces)) - 1
    waits = [_pool().submit(_drain, pieces) for _ in range(helpers)]
    try:
        _drain(pieces)
    finally:  # whatever happens, nobody writes after this has returned
        pieces.clear()
        for wait in waits:
            wait.result()


def _drain(pieces: deque[tuple[np.ndarray, np.ndarray]]) -> None:
    while True:
        try:
            destination, source = pieces.popleft()
        except IndexError:
            return
        np.copyto(destination, source)


def _pieces(tensor: torch.Tensor) -> Iterator[np.ndarray]:
    """A tensor, cut along its longest leading axes, as words of its element size (numpy has no bfloat16)."""
    words = tensor.detach().view(_WORDS[tensor.dtype.itemsize])
    axis = max(range(min(2, words.ndim)), key=lambda a: words.shape[a])
    count = min(words.shape[axis], -(-tensor.numel() * tensor.dtype.itemsize // _PIECE_BYTES))
    return (part.numpy() for part in (words.tensor_split(count, axis) if count > 1 else [words]))


_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def _pool() -> ThreadPoolExecutor:
    """This process's helpers; a fork has none of its parent's."""
    with _lock:
        pid = os.getpid()
        if pid not in _pools:
            _pools.clear()
            _pools[pid] = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), "kvdata-copy")
        return _pools[pid]
