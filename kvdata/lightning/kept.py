"""Stored caches that are kept in memory, for a server that restarts and has lost them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

Address: TypeAlias = tuple[tuple[int, ...], str]

_LOOKUPS_TOGETHER = 64


class Kept:
    """All addresses that were stored, and the caches of the last ones of them.

    Args:
        limit_bytes: of the caches.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._caches: dict[Address, torch.Tensor | None] = {}  # in the order in which they were stored

    def add(self, address: Address, kv: torch.Tensor) -> None:
        """Keep one, and let go of the oldest where they become too many."""
        self.forget(address)
        if kv.untyped_storage().nbytes() > kv.nbytes:
            kv = kv.clone()  # not the batch of which it is a part
        self._caches[address] = kv
        self._bytes += kv.nbytes
        for old, cache in self._caches.items() if self._bytes > self._limit else ():
            if cache is not None:
                self._caches[old] = None
                self._bytes -= cache.nbytes
            if self._bytes <= self._limit:
                break

    def forget(self, address: Address) -> None:
        """Nothing of this one."""
        cache = self._caches.pop(address, None)
        self._bytes -= 0 if cache is None else cache.nbytes

    def gone(
        self, look_up: Callable[[Sequence[Sequence[int]], Sequence[str]], list[int]]
    ) -> dict[Address, torch.Tensor | None]:
        """Those of which ``look_up(tokens of each, salt of each)`` finds fewer tokens; None for what was let go."""
        gone, every = dict[Address, torch.Tensor | None](), list(self._caches.items())
        for start in range(0, len(every), _LOOKUPS_TOGETHER):
            some = every[start : start + _LOOKUPS_TOGETHER]
            found = look_up([tokens for (tokens, _), _ in some], [salt for (_, salt), _ in some])
            gone.update((address, kv) for (address, kv), hit in zip(some, found, strict=True) if hit < len(address[0]))
        return gone
