"""`Deadline`: when a whole operation must have ended."""

from __future__ import annotations

import time


class Deadline:
    """A point in time that ends a whole operation, however many messages it takes."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def shorter(self, seconds: float) -> Deadline:
        """One for a part of the operation: so many seconds at most."""
        return Deadline(min(self.remaining(), seconds))
