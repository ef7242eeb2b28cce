"""Shards: safetensors files, the only place that knows the library."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvdata.errors import SnapshotDamaged

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError as missing:
    raise ImportError("snapshots need safetensors: pip install 'kvdata[snapshot]'") from missing


def write_shard(path: Path, tensors: Mapping[int, torch.Tensor]) -> None:
    """Write contiguous tensors, named by number; `OSError` with its errno when the file system refuses."""
    try:
        save_file({str(number): tensor for number, tensor in tensors.items()}, path)
    except SafetensorError as exc:  # the library wraps what the system said
        said = re.search(r"(?:os error|code:) (\d+)", str(exc))
        raise OSError(int(said[1]) if said else errno.EIO, str(exc)) from exc


class Shard:
    """A shard mapped into memory; its tensors are views of the map.

    The map is private: who writes into a view changes it for this process, never the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: Any = safe_open(path, "pt")
        except (SafetensorError, OSError) as exc:
            raise _damaged(path, exc) from exc

    def view(self, number: int) -> torch.Tensor:
        """The tensor of that number; `SnapshotDamaged` when it is not there."""
        try:
            tensor: torch.Tensor = self._file.get_tensor(str(number))
        except SafetensorError as exc:
            raise _damaged(self._path, exc) from exc
        return tensor


def _damaged(path: Path, exc: Exception) -> SnapshotDamaged:
    return SnapshotDamaged(
        f"{path} is not the shard that the index lists ({exc}); delete this file and write the snapshot again"
    )
