"""Mapping a server's shared-memory pool.

Plain ``open`` + ``mmap`` on the POSIX segment's file. Python's ``multiprocessing.shared_memory`` would
register the server's segment with a resource tracker that removes it when the client exits.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from kvdata.errors import InvalidRequest, ServerError

SHM_FOLDER = Path("/dev/shm")
POOL_PREFIX = "lmcache_l1_pool_"
_SHOWN = 80  # characters of a name in an error


def pool_path(name: str) -> Path:
    """File of a segment; `ValueError` for a name that would leave the folder, or is not one of LMCache's.

    All servers' names begin alike: none can make its clients write into other programs' shared memory.
    """
    if not re.fullmatch(POOL_PREFIX + r"[A-Za-z0-9._-]{1,200}", name):
        raise ValueError(f"{name[:_SHOWN]!r} is not the name of a shared-memory pool")
    return SHM_FOLDER / name


class MappedPool:
    """A pool mapped into this process, read and write.

    Args:
        name: the segment's name as the server reports it.
        size: its size in bytes as the server reports it.
        prefault: map all of its pages now instead of each at its first use.

    Raises:
        OSError: it cannot be opened, or is smaller than reported.
        ValueError: the name is not one of a segment.
    """

    def __init__(self, name: str, size: int, prefault: bool = False) -> None:
        self.path = pool_path(name)
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            if found.st_size < size or size <= 0:
                raise OSError(f"{self.path} has {found.st_size} bytes, the server reported {size}")
            self.identity = (found.st_dev, found.st_ino)
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0))
        finally:
            os.close(fd)
        self.size = size

    def is_current(self) -> bool:
        """False once the name belongs to another segment (a restarted server) or is gone."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.identity and found.st_size >= self.size

    def view(self, offset: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat tensor over ``length`` bytes at ``offset``; `ValueError` when they leave the pool, or cut an element."""
        inside = offset >= 0 and 0 < length <= self.size - offset
        if not inside or length % dtype.itemsize or offset % dtype.itemsize:
            raise ValueError(f"{length} bytes at {offset} do not lie in a pool of {self.size} bytes")
        return torch.frombuffer(self._map, dtype=dtype, count=length // dtype.itemsize, offset=offset)

    def close(self) -> None:
        """Unmap. Memory still seen by a tensor is unmapped when that tensor goes."""
        try:
            self._map.close()
        except BufferError:
            pass


# Where a pool that kvdata created ends: one more page with this mark, which no client maps or needs.
_MARK = b"kvdata pool\n"


class OwnedPool(MappedPool):
    """A pool that this process creates, maps, holds under a lock, and removes in `close`.

    The lock (``flock``) ends with the process however that ends, so a marked segment without one was left by
    a killed server. Those of this name, and any ``lmcache_l1_pool_kvdata-*``, are removed first. A segment
    without the mark is never removed: LMCache itself holds no lock on the segments it is using.

    Args:
        name: the segment's whole name.
        size: bytes to offer; one page more is created.

    Raises:
        FileExistsError: a running server, or something that is not kvdata's, has the name.
        OSError: the folder lacks the room (``ENOSPC``), or cannot be written.
        ValueError: the name is not one of a segment.
    """

    def __init__(self, name: str, size: int) -> None:
        path = pool_path(name)
        for left in {path, *SHM_FOLDER.glob(f"{POOL_PREFIX}kvdata-*")}:
            _remove_stale(left)
        room = os.statvfs(SHM_FOLDER)
        if size + mmap.PAGESIZE > room.f_bavail * room.f_frsize:
            free = room.f_bavail * room.f_frsize
            raise OSError(errno.ENOSPC, f"{size} bytes do not fit, {free} are free", str(SHM_FOLDER))
        self._lock = _create_locked(path)
        self._owner = os.getpid()
        try:
            os.ftruncate(self._lock, size + mmap.PAGESIZE)
            os.pwrite(self._lock, _MARK, size)
            super().__init__(name, size)
        except BaseException:
            path.unlink()
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Remove the name, unmap, unlock. In a forked child the name stays: it is the parent's."""
        if self._lock < 0:
            return
        if os.getpid() == self._owner and self.is_current():
            self.path.unlink()
        super().close()
        os.close(self._lock)
        self._lock = -1


_numbers = itertools.count()


def create_pool(name: str | None, size: int) -> OwnedPool:
    """A new pool of ``size`` bytes for a server in this process.

    Args:
        name: with or without ``lmcache_l1_pool_``; None for a free ``kvdata-<pid>-<n>``.

    Raises:
        ServerError: the name is in use, or shared memory lacks the room.
        InvalidRequest: the name is not one of a segment.
    """
    # Another container may see the same folder and have the same pid: then the next number.
    names: Iterable[str] = (f"kvdata-{os.getpid()}-{next(_numbers)}" for _ in range(100))
    for candidate in names if name is None else [name.removeprefix(POOL_PREFIX)]:
        try:
            return OwnedPool(POOL_PREFIX + candidate, size)
        except FileExistsError:
            continue
        except ValueError as exc:
            raise InvalidRequest(f"shm_name: {exc}; use letters, digits, '.', '_' and '-'") from exc
        except OSError as exc:
            hint = "; take a smaller pool, or pickle transfer" if exc.errno == errno.ENOSPC else ""
            raise ServerError(f"cannot create the shared-memory pool: {exc}{hint}") from exc
    raise ServerError(
        f"the shared-memory name {name!r} is in use by another server; choose another "
        "(or remove the segment, if you know that its server is gone)"
    )


def _is_file_of(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def _create_locked(path: Path) -> int:
    """Descriptor of a new, empty, locked segment; until the lock, another start may take it for stale."""
    for _ in range(100):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if _is_file_of(fd, path):
            return fd
        os.close(fd)
    raise FileExistsError(errno.EEXIST, "other processes keep removing the segment", str(path))


def _remove_stale(path: Path) -> None:
    """Remove a segment that kvdata created and nobody holds; leave everything else alone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(fd).st_size
        # Killed between creating and marking: empty.
        ours = size == 0 or os.pread(fd, len(_MARK), max(0, size - mmap.PAGESIZE)) == _MARK
        if ours and _is_file_of(fd, path):
            path.unlink()
    except OSError:
        pass  # locked: in use
    finally:
        os.close(fd)
