"""Where a policy loses most: by document, and the single windows, with their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvdata.datasets.prefixes import Prefixes
from kvdata.evaluation.continuations import NEXT
from kvdata.evaluation.results import grouped, increases
from kvdata.evaluation.runs import FULL, Row

WORST = 3
_SHOWN_TOKENS = 48


@dataclass(frozen=True)
class Document:
    """One document's mean NLL increase by policy and budget, over `windows` of it."""

    name: str
    windows: int
    delta_nll: dict[tuple[str, float], float]


@dataclass(frozen=True)
class Worst:
    """One of the windows in which a policy loses most; `before` and `after` are the texts around the cache's end."""

    policy: str
    keep: float
    document: str
    window: int
    delta_nll: float
    nll: float
    kl: float
    before: str
    after: str


def document_of(meta: Mapping[str, Any]) -> str:
    """What a window's labels say of its document."""
    return str(next((meta[name] for name in ("name", "file", "document", "id") if name in meta), "?"))


def by_document(rows: Sequence[Row], windows: Prefixes) -> list[Document]:
    """Documents, that with the largest mean increase over all policies first."""
    full = {row.window: row for row in rows if row.policy == FULL}
    names = {window: document_of(windows[window].meta) for window in full}
    found = [
        Document(name, sum(other == name for other in names.values()), deltas)
        for name in dict.fromkeys(names.values())
        if (deltas := _deltas([row for row in rows if names[row.window] == name], full))
    ]
    return sorted(found, key=lambda document: -fmean(document.delta_nll.values()))


def worst_windows(rows: Sequence[Row], windows: Prefixes, decode: Callable[[list[int]], str]) -> list[Worst]:
    """The `WORST` windows of every policy at every budget; `decode` makes text of token ids."""
    full = {row.window: row for row in rows if row.policy == FULL}
    found = []
    for (policy, keep), own in grouped(rows).items():
        if policy != FULL:
            order = sorted(zip(increases(own, full), own, strict=True), key=lambda pair: -pair[0])
            found += [_worst(policy, keep, delta, row, windows, decode) for delta, row in order[:WORST]]
    return found


def _deltas(rows: Sequence[Row], full: Mapping[int, Row]) -> dict[tuple[str, float], float]:
    return {key: fmean(increases(own, full)) for key, own in grouped(rows).items() if key[0] != FULL}


def _worst(
    policy: str, keep: float, delta: float, row: Row, windows: Prefixes, decode: Callable[[list[int]], str]
) -> Worst:
    record = windows[row.window]
    before = decode(record.tokens[-_SHOWN_TOKENS:].tolist())
    after = decode(record.continuation[:_SHOWN_TOKENS].tolist())
    name = document_of(record.meta)
    return Worst(policy, keep, name, row.window, delta, row.nll[NEXT], row.kl[NEXT], before, after)
