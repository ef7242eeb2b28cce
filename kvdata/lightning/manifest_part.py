"""A rank's share of a manifest, and how the shares of all ranks become the manifest.

Each rank appends a line for each cache, once that is stored, to ``<manifest>.rank<N>.part``. When all ranks are done,
rank 0 takes the lines of all parts into the manifest. After an exception the parts stay: their lines tell of caches
that are stored. The next run with this manifest appends to them and takes them all in, also those of ranks that it
does not have.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvdata.datasets.manifest import Manifest, Written
from kvdata.errors import StoreFailed


class ManifestPart:
    """The part of one rank, opened to append; what an interruption left of a last line is cut off.

    Args:
        manifest: the manifest's path.
        rank: whose part.

    Attributes:
        path, size: of the file; bytes.

    Raises:
        InvalidRequest: there is a file at the manifest's path that is no manifest.
        StoreFailed: another process is writing this part, or the folder cannot be written.
    """

    def __init__(self, manifest: Path, rank: int) -> None:
        if manifest.exists():
            Manifest.load(manifest)  # better now than when the work is done
        self.path = manifest.with_name(f"{manifest.name}.rank{rank}.part")
        with _named(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()
            self._claim()
            self.size = len(_whole_lines(self.path))
            self._file.truncate(self.size)

    def add(self, entry: Written) -> None:
        """Append a line."""
        line = entry.line().encode()
        with _named(self.path):
            self._file.write(line)
            self._file.flush()
        self.size += len(line)

    def sync(self) -> None:
        """Bring all lines to the disk."""
        with _named(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file, which stays."""
        self._file.close()

    def _claim(self) -> None:
        try:
            _lock(self._file)
        except BlockingIOError as exc:
            self._file.close()
            raise StoreFailed(
                f"another process is writing {self.path}; wait for it, or give this run another manifest"
            ) from exc


def commit(manifest: Path, written: int) -> None:
    """Take the lines of all parts into the manifest, and remove the parts. Nobody may be writing them.

    The manifest is replaced as a whole; its own lines stay, unless a part has one of the same address. Interrupted
    anywhere, it can be called again.

    Args:
        manifest: its path.
        written: bytes that all ranks have in their parts.

    Raises:
        StoreFailed: a part is not there, or the manifest cannot be written; the parts are kept.
        InvalidRequest: a file is no manifest.
    """
    parts = _parts_of(manifest)
    found = sum(part.stat().st_size for part in parts)
    if found < written:
        raise StoreFailed(
            f"the ranks wrote {written:,} bytes of manifest, {found:,} are in {manifest.parent}: it must be a folder "
            "that all ranks share. The caches are stored, and the parts are kept where they are"
        )
    if parts:
        old = list(Manifest.load(manifest)) if manifest.exists() else []
        new = (entry for part in parts for entry in Manifest.parse(_whole_lines(part), part))
        with _named(manifest):
            Manifest([*old, *new]).save(manifest)
            for part in parts:
                part.unlink()


def _parts_of(manifest: Path) -> list[Path]:
    """Parts of all ranks, by rank."""
    pattern = re.compile(re.escape(manifest.name) + r"\.rank(\d+)\.part")
    if not manifest.parent.is_dir():
        return []
    matches = ((pattern.fullmatch(path.name), path) for path in manifest.parent.iterdir())
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _lock(file: IO[bytes]) -> None:
    """Keep other processes out until the file is closed, where the file system can; `BlockingIOError` if one is in."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """`StoreFailed` in place of what the system says of a file."""
    try:
        yield
    except OSError as exc:
        raise StoreFailed(
            f"{path} cannot be written ({exc}); the caches are stored: correct this and run the same again"
        ) from exc
