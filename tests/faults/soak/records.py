"""What is written down of a soak: operations, faults, and what processes and the server hold.

An operation is written when it begins and when it ends, straight to a file, so that none is forgotten when its process
is killed. Times are of `time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

KILLED, LOST = "killed", "lost"  # began and never ended: with its process, or for no reason


@dataclass(frozen=True)
class Operation:
    """One call of a client.

    Attributes:
        client: whose.
        kind: which.
        start, end: when; the end is None where there was none.
        outcome: ``ok``, ``partial``, ``dedup``, ``miss``, ``wrong``, the name of an error's type,
            `KILLED` or `LOST`.
        said: an error's message.
        complaint: what is wrong with that error whatever went wrong: foreign, or lacking what it must say.
    """

    client: str
    kind: str
    start: float
    end: float | None
    outcome: str
    said: str = ""
    complaint: str = ""

    @property
    def seconds(self) -> float:
        return 0.0 if self.end is None else self.end - self.start


@dataclass(frozen=True)
class Struck:
    """One fault: when it was on, and how many messages, chunks or processes it struck."""

    name: str
    start: float
    end: float
    times: int


@dataclass
class Held:
    """What somebody holds, at its ``start`` and at its ``end``: figures by name."""

    who: str
    start: dict[str, float]
    end: dict[str, float] = field(default_factory=dict)


class Journal:
    """One thread's operations, in a file of its own."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._number = 0

    def begins(self, kind: str) -> None:
        self._number += 1
        self._write(self._number, kind, time.monotonic())

    def ended(self, end: float, outcome: str, said: str = "", complaint: str = "") -> None:
        self._write(self._number, outcome, end, said, complaint)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, *parts: object) -> None:
        os.write(self._file, json.dumps(parts).encode() + b"\n")


def read(folder: Path, killed: Collection[str]) -> Iterator[Operation]:
    """The operations of all journals, each once; ``killed`` names the clients that were."""
    for path in sorted(folder.glob("*.jsonl")):
        client = path.stem.rpartition(".")[0]
        unended = KILLED if client in killed else LOST
        begun: tuple[int, str, float] | None = None
        for line in path.read_text().splitlines():
            number, *parts = json.loads(line)
            if begun is None and len(parts) == 2:
                begun = (number, *parts)
            elif begun is not None and begun[0] == number and len(parts) == 4:
                outcome, end, said, complaint = parts
                yield Operation(client, *begun[1:], end, outcome, said, complaint)
                begun = None
            else:
                raise ValueError(f"{path.name}: {line} does not follow {begun}")
        if begun is not None:
            yield Operation(client, *begun[1:], None, unended)
