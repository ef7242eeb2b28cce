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
_WORDS = (torch.int64, torch.int32, torch.int16)


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copy each source to its destination, on as many threads as PyTorch may use here; dtypes may differ."""
    pieces: deque[tuple[np.ndarray, np.ndarray]] = deque()
    for destination, source in pairs:
        if destination.dtype == source.dtype:
            destination, source = _as_words(destination, source)
        if destination.dtype == source.dtype and destination.stride(-1) == source.stride(-1) == 1:
            pieces += zip(_pieces(destination), _pieces(source), strict=True)
        else:  # converted, or in another order
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
    """A tensor, cut along the longer of its first two axes."""
    axis = max(range(min(2, tensor.ndim)), key=lambda a: tensor.shape[a])
    count = min(tensor.shape[axis], -(-tensor.numel() * tensor.dtype.itemsize // _PIECE_BYTES))
    return (part.numpy() for part in (tensor.tensor_split(count, axis) if count > 1 else [tensor]))


def _as_words(destination: torch.Tensor, source: torch.Tensor) -> Pair:
    """Both as integers, as wide as their strides allow: numpy has no bfloat16, and fewer words are copied faster."""
    for words in _WORDS:
        if words.itemsize >= destination.dtype.itemsize:
            try:
                return destination.detach().view(words), source.detach().view(words)
            except RuntimeError:  # some stride is not a whole number of them
                continue
    return destination, source


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
