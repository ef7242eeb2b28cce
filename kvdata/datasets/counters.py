"""What a dataset did, counted over all processes that read it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils.data import get_worker_info

FIELDS = (
    "samples",
    "hits",
    "partial_hits",
    "misses",
    "skipped",
    "substituted",
    "refilled",
    "retries",
    "bytes",
    "fetch_seconds",
)
_ROWS = 65  # the parent, and workers by their number modulo 64


class Counters:
    """Sums that DataLoader workers and their parent add to, each in a row of its own of shared memory.

    A copy made by plain `pickle` counts for itself.
    """

    def __init__(self) -> None:
        self._rows = torch.zeros(_ROWS, len(FIELDS), dtype=torch.float64)
        self._rows.share_memory_()  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to this process's sums."""
        row = self._own()
        with self._lock:
            for name, amount in amounts.items():
                row[FIELDS.index(name)] += amount

    def own(self, name: str) -> float:
        """One sum of this process alone."""
        return float(self._own()[FIELDS.index(name)])

    def _own(self) -> torch.Tensor:
        info = get_worker_info()
        return self._rows[0 if info is None else 1 + info.id % (_ROWS - 1)]

    def total(self) -> dict[str, float]:
        """Sums over all processes; counts as whole numbers."""
        sums = dict(zip(FIELDS, self._rows.sum(0).tolist(), strict=True))
        return {name: value if name == "fetch_seconds" else int(value) for name, value in sums.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"_rows": self._rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._rows = state["_rows"]
        self._lock = threading.Lock()
