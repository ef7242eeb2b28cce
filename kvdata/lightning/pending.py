"""`Pending`: a queue between two threads that is bounded in bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_CHECK_SECONDS = 5.0


class Pending(Generic[T]):
    """Items that wait for one consumer, or are in its hands: together at most so many bytes, or a single larger item.

    Args:
        limit_bytes: the bound.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: T, size: int, seconds: float) -> bool:
        """Append an item of ``size`` bytes once there is room; False when there is none within ``seconds``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._fits(size), seconds):
                return False
            self._items.append((item, size))
            self._bytes += size
            self._changed.notify_all()
        return True

    def consume(self, work: Callable[[T], None]) -> None:
        """Call ``work`` with each item, until `close` was called and none is left."""
        while self._consume_one(work):
            pass

    def wait_done(self, seconds: float) -> bool:
        """Wait until ``work`` has returned from all items; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._items and not self._busy, seconds)

    def drop(self) -> list[T]:
        """Take back what no ``work`` has begun with."""
        with self._changed:
            dropped = [item for item, _ in self._items]
            self._bytes -= sum(size for _, size in self._items)
            self._items.clear()
            self._changed.notify_all()
        return dropped

    def close(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _consume_one(self, work: Callable[[T], None]) -> bool:
        with self._changed:
            while not self._items and not self._closed:
                self._changed.wait(_CHECK_SECONDS)
            if not self._items:
                return False
            item, size = self._items.popleft()
            self._busy = True
        try:
            work(item)
        finally:
            del item  # its memory counts no longer
            with self._changed:
                self._bytes -= size
                self._busy = False
                self._changed.notify_all()
        return True

    def _fits(self, size: int) -> bool:
        return not size or not self._bytes or self._bytes + size <= self._limit
