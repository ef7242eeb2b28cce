"""Comparing fairly: ours, upstream's and the limit's turns alternate within one run, and medians are compared."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], float]  # does the work once, returns the seconds that count


_TURN_SECONDS, _MOST_TIMES = 0.1, 50


@dataclass
class Trial:
    """One row: three ways to do the same work.

    Attributes:
        amount: what one piece of work moves or does, in the unit's numerator (10^9 bytes for GB/s).
        unit: of the figures.
        ours, upstream, limit: the work; None where there is nothing to compare with.
    """

    amount: float
    unit: str
    ours: Work
    upstream: Work | None = None
    limit: Work | None = None


def timed(action: Callable[[], object]) -> Work:
    """An action as work, all of whose time counts."""

    def work() -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    return work


def undone(work: Work, undo: Callable[[], object]) -> Work:
    """Work whose effect is taken back each time, which does not count."""

    def done() -> float:
        seconds = work()
        undo()
        return seconds

    return done


def compare(trial: Trial, repeats: int) -> dict[str, Any]:
    """Medians of ``repeats`` rounds after two to warm up, as rates and ratios.

    Short work is done several times in its turn, of which the mean counts, so that a turn is not one lucky moment.
    """
    sides = {"ours": trial.ours, "upstream": trial.upstream, "limit": trial.limit}
    works = {name: work for name, work in sides.items() if work}
    _turns(works, dict.fromkeys(works, 1))
    first = _turns(works, dict.fromkeys(works, 1))
    times = {name: min(_MOST_TIMES, math.ceil(_TURN_SECONDS / seconds)) for name, seconds in first.items()}
    rounds = [_turns(works, times) for _ in range(repeats)]
    rates = {name: trial.amount / statistics.median(turn[name] for turn in rounds) for name in works}
    return row(**rates, unit=trial.unit)


def _turns(works: dict[str, Work], times: dict[str, int]) -> dict[str, float]:
    """Each one's turn: the mean seconds of so many times."""
    return {name: statistics.mean(work() for _ in range(times[name])) for name, work in works.items()}


def row(ours: float, unit: str, upstream: float | None = None, limit: float | None = None) -> dict[str, Any]:
    """A row's figures, without its name and server."""
    return {
        "ours": rounded(ours),
        "upstream": rounded(upstream),
        "limit": rounded(limit),
        "unit": unit,
        "vs_upstream": rounded(ours / upstream) if upstream else None,
        "vs_limit": rounded(ours / limit) if limit else None,
    }


def rounded(value: float | None) -> float | None:
    """Four significant digits."""
    return None if value is None else float(f"{value:.4g}")


def memcpy(source: torch.Tensor, times: int = 1, shared: bool = False) -> Work:
    """A plain copy into a buffer that was written before, ``times`` over: what the memory can do.

    Args:
        source: what is copied.
        times: how often.
        shared: into shared memory, as a server's pool is.
    """
    target = source.clone().share_memory_() if shared else source.clone()

    def copy() -> None:
        for _ in range(times):
            target.copy_(source)

    return timed(copy)
