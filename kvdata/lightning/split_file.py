"""The file that says which documents are in which split, so that no later run splits them otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from kvdata.errors import InvalidRequest

VERSION = 1


class SplitFile(msgspec.Struct, frozen=True):
    """Its content.

    Attributes:
        prefixes: digest of all prefixes, `Prefixes.digest`.
        chosen: what decides the splits.
        documents: names of each split's documents.
    """

    prefixes: str
    chosen: dict[str, Any]
    documents: dict[str, list[str]]
    kvdata_splits: int = VERSION

    def write(self, path: Path) -> None:
        """Write it, whole or not at all; `InvalidRequest` when the file that is there says something else."""
        if path.exists():
            self.require(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        part.replace(path)

    def require(self, path: Path) -> None:
        """`InvalidRequest` unless the file is there and says the same."""
        try:
            written = msgspec.json.decode(path.read_bytes(), type=SplitFile)
        except OSError as exc:
            raise InvalidRequest(
                f"the splits cannot be read ({exc}): prepare_data writes them, into a folder that all ranks share; "
                "give another with split_file="
            ) from exc
        except msgspec.DecodeError as exc:
            raise InvalidRequest(f"{path} holds no splits ({exc}); delete it, or give another split_file=") from exc
        changed = self._changed(written)
        if changed:
            raise InvalidRequest(
                f"{path} was written for other {', '.join(changed)}: what was trained with it may have seen documents "
                "that would now be held out. Restore these, or begin anew with another split_file="
            )

    def _changed(self, written: SplitFile) -> list[str]:
        keys = sorted(self.chosen.keys() | written.chosen.keys())
        changed = [key for key in keys if self.chosen.get(key) != written.chosen.get(key)]
        names = ("prefixes", "documents", "kvdata_splits")
        return [name for name in names if getattr(self, name) != getattr(written, name)] + changed
