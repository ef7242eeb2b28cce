"""The file that says which documents are in which split, so that no later run splits them otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from kvdata.datasets.prefixes import Prefixes
from kvdata.datasets.splits import document_names
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

    @classmethod
    def read(cls, path: Path) -> SplitFile:
        """The content of a file; `InvalidRequest` when there is none, or it holds something else."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as exc:
            raise InvalidRequest(
                f"the splits cannot be read ({exc}): prepare_data writes them, into a folder that all ranks share; "
                "give another with split_file="
            ) from exc
        except msgspec.DecodeError as exc:
            raise InvalidRequest(f"{path} holds no splits ({exc}); delete it, or give another split_file=") from exc

    def held_out(self, prefixes: Prefixes) -> Prefixes:
        """The test's prefixes; `InvalidRequest` when these are not the prefixes that were split."""
        if prefixes.digest() != self.prefixes:
            raise InvalidRequest("the splits were written for another prefix file")
        names = document_names(prefixes, str(self.chosen["split_by"]))
        chosen = set(self.documents["test"])
        return prefixes.select(i for i, name in enumerate(names) if name in chosen)

    def require(self, path: Path) -> None:
        """`InvalidRequest` unless the file is there and says the same."""
        written = self.read(path)
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
