"""Policies are compared with those that see the same: the order and the words for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvdata.edits.policies import Sees
from kvdata.evaluation.results import Result

WORDS = {
    Sees.CACHE: "sees K, V and positions",
    Sees.QUERIES: "also sees the queries asked over the prefix",
    Sees.QUESTION: "also sees the question",
    Sees.FUTURE: "sees the answer: a bound, not a competitor",
}


def budgets(results: Sequence[Result]) -> list[float]:
    """Shares below the full cache, the largest first."""
    return sorted({r.keep for r in results if r.keep < 1}, reverse=True)


def by_kind(results: Sequence[Result], keep: float) -> Iterator[tuple[Sees, list[Result]]]:
    """The results of one budget by what they see, the smallest NLL increase first."""
    for sees in Sees:
        if rows := [r for r in results if r.keep == keep and r.sees is sees]:
            yield sees, sorted(rows, key=lambda r: r.delta_nll)
