"""Files that are there whole or not at all, and a folder that one process writes at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from kvdata.errors import DiskFull, SnapshotError

PARTS = ".part"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write the new content of ``path``; at the block's end it is flushed to the disk and renamed.

    That place is in a folder of its own, removed in any case: libraries write through temporary files beside it.

    Raises:
        DiskFull: there is no room; nothing of the new content is left.
        SnapshotError: the file cannot be written for another reason.
    """
    parts = path.parent / PARTS
    part = parts / path.name
    try:
        parts.mkdir(exist_ok=True)
        yield part
        part.chmod(path.parent.stat().st_mode & 0o666)  # as readable as its folder: safetensors makes it private
        _flush(part)
        part.replace(path)
        _flush(path.parent)
    except OSError as exc:
        if exc.errno in _NO_ROOM:
            raise DiskFull(
                f"no room for {path} ({exc}); what was finished is kept: free some space and run this again"
            ) from exc
        raise SnapshotError(f"{path} cannot be written: {exc}") from exc
    finally:
        shutil.rmtree(parts, ignore_errors=True)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other writers out of ``folder``; `SnapshotError` when there is one."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise SnapshotError(f"another process is writing {folder}; wait for it, or choose another folder") from exc
        except OSError:  # a network file system that cannot lock a folder
            pass
        yield
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """BLAKE3 of a file, in hexadecimal; by one thread, since its pool of threads does not survive a fork."""
    return blake3().update_mmap(path).hexdigest()


def unchanged(path: Path, expected: str) -> bool:
    """Whether a file is there and has this digest."""
    return path.is_file() and digest(path) == expected


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
