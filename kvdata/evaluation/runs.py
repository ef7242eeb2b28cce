"""A folder of results: one line per finished measurement, so that an interrupted evaluation goes on where it was.

settings.json   what is measured: windows, model, chunk size
rows.jsonl      one `Row` per window, policy and budget
passkey.jsonl   one `PasskeyRow` per prompt, policy and budget
live.jsonl      one `LiveRow` per window, policy and budget, from a serving engine
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from kvdata.errors import InvalidRequest, OtherEvaluation

FULL = "full"
Key = tuple[int, str, str, float]

SETTINGS = "settings.json"
_VERSION = 1


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What all rows have: which source, compressed by what, and to how much.

    Attributes:
        window: place of the window in the prefix file, or of the prompt.
        policy, revision: what made the cache; ``"full"`` is the uncompressed one.
        keep: share of the tokens asked for; `kept_tokens` is what it came to in whole chunks.
        sees, trained: as of the policy.
    """

    window: int
    policy: str
    revision: str
    keep: float
    kept_tokens: int
    sees: str = "cache"
    trained: bool = False

    @property
    def key(self) -> Key:
        """Tells it from all other rows of its file."""
        return self.window, self.policy, self.revision, self.keep


class Row(Measured, frozen=True, kw_only=True):
    """One window's continuations after one cache that was read back from the server.

    Attributes:
        stored_bytes: of the cache.
        nll, kl, top1: by kind of continuation (``"next"``, ``"recall 25 %"``, ...); nats per token, share.
        attention_error: relative error of a layer's attention output, mean over layers.
        seconds: ``inputs`` (model passes that give the policy what it sees besides the cache), ``score``, ``write``,
            ``read``.
    """

    stored_bytes: int
    nll: dict[str, float]
    kl: dict[str, float]
    top1: dict[str, float]
    attention_error: float | None = None
    seconds: dict[str, float] = {}


class PasskeyRow(Measured, frozen=True, kw_only=True):
    """Whether the number hidden at a depth (share of the prompt) was decoded greedily from one cache."""

    depth: float
    found: bool


class LiveRow(Measured, frozen=True, kw_only=True):
    """A fixed continuation scored by a serving engine from one cache.

    Attributes:
        tokens: scored.
        nll: of the engine, nats per token.
        offline_nll: of the same tokens, from the same cache, by the model here.
        read_chunks, expected_chunks: what the server counted as read, and what it counts when all of it was a hit.
    """

    tokens: int
    nll: float
    offline_nll: float
    read_chunks: int
    expected_chunks: int


M = TypeVar("M", bound=Measured)


class Rows(Generic[M]):
    """The rows of one file: those found in it, and those added. Each is on the disk before `add` returns.

    Raises:
        InvalidRequest: a line is no row of this kind; half a line at the end, left by a crash, is dropped.
    """

    def __init__(self, path: Path, kind: type[M]) -> None:
        self.path = path
        self._rows: dict[Key, M] = {}
        if path.exists():
            _drop_half_line(path)
            for number, line in enumerate(path.read_bytes().splitlines(), start=1):
                try:
                    row = msgspec.json.decode(line, type=kind)
                except msgspec.DecodeError as exc:
                    raise InvalidRequest(f"{path}, line {number}: {exc}; evaluate into another folder") from exc
                self._rows[row.key] = row

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def __getitem__(self, key: Key) -> M:
        return self._rows[key]

    def add(self, row: M) -> None:
        """Append one."""
        with open(self.path, "ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        self._rows[row.key] = row


def open_run(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Make the folder of an evaluation, or go on with one.

    Args:
        settings: plain values that all rows of the folder have in common.

    Raises:
        OtherEvaluation: the folder holds rows under other settings, or files of something else.
    """
    wanted = {"kvdata_evaluation": _VERSION, **settings}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / SETTINGS
    if not file.exists():
        if any(folder.iterdir()):
            raise OtherEvaluation(f"{folder} is not empty and holds no evaluation; choose another folder")
        part = folder / (SETTINGS + ".part")
        part.write_text(json.dumps(wanted, indent=2) + "\n")
        part.replace(file)
        return folder
    try:
        found = json.loads(file.read_bytes())
    except ValueError as exc:
        raise OtherEvaluation(f"{file} is not the settings of an evaluation ({exc}); choose another folder") from exc
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            raise OtherEvaluation(
                f"{folder} holds the evaluation of another run: its {name} is {found.get(name)!r}, not "
                f"{wanted.get(name)!r}; choose another folder"
            )
    return folder


def _drop_half_line(path: Path) -> None:
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
