"""Mapping a server's shared-memory pool.

Plain ``open`` + ``mmap`` on the POSIX segment's file. Python's ``multiprocessing.shared_memory`` would
register the server's segment with a resource tracker that removes it when the client exits.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import torch

SHM_FOLDER = Path("/dev/shm")
POOL_PREFIX = "lmcache_l1_pool_"


def pool_path(name: str) -> Path:
    """File of a segment; `ValueError` for a name that would leave the folder."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name) or name in (".", ".."):
        raise ValueError(f"{name!r} is not a shared-memory name")
    return SHM_FOLDER / name


class MappedPool:
    """A pool mapped into this process, read and write.

    Args:
        name: the segment's name as the server reports it.
        size: its size in bytes as the server reports it.

    Raises:
        OSError: it cannot be opened, or is smaller than reported.
        ValueError: the name is not one of a segment.
    """

    def __init__(self, name: str, size: int) -> None:
        self.path = pool_path(name)
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            if found.st_size < size or size <= 0:
                raise OSError(f"{self.path} has {found.st_size} bytes, the server reported {size}")
            self._identity = (found.st_dev, found.st_ino)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.size = size

    def is_current(self) -> bool:
        """False once the name belongs to another segment (a restarted server) or is gone."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity and found.st_size >= self.size

    def view(self, offset: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat tensor over ``length`` bytes at ``offset``; `ValueError` when they leave the pool."""
        if offset < 0 or length <= 0 or offset + length > self.size or length % dtype.itemsize:
            raise ValueError(f"{length} bytes at {offset} do not lie in a pool of {self.size} bytes")
        return torch.frombuffer(self._map, dtype=dtype, count=length // dtype.itemsize, offset=offset)

    def close(self) -> None:
        """Unmap. Memory still seen by a tensor is unmapped when that tensor goes."""
        try:
            self._map.close()
        except BufferError:
            pass
