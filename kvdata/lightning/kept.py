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
        self._addresses: dict[Address, None] = {}  # both in the order in which they were stored
        self._caches: dict[Address, torch.Tensor] = {}

    def add(self, address: Address, kv: torch.Tensor) -> None:
        """Keep one, and let go of the oldest where they become too many."""
        self.forget(address)
        if kv.untyped_storage().nbytes() > kv.nbytes:
            kv = kv.clone()  # not the batch of which it is a part
        self._addresses[address], self._caches[address] = None, kv
        self._bytes += kv.nbytes
        while self._bytes > self._limit:
            self._let_go(next(iter(self._caches)))

    def forget(self, address: Address) -> None:
        """Nothing of this one."""
        self._addresses.pop(address, None)
        self._let_go(address)

    def gone(
        self, look_up: Callable[[Sequence[Sequence[int]], Sequence[str]], list[int]]
    ) -> dict[Address, torch.Tensor | None]:
        """Those of which ``look_up(tokens of each, salt of each)`` finds fewer tokens; None for what was let go."""
        gone, every = dict[Address, torch.Tensor | None](), [(a, self._caches.get(a)) for a in self._addresses]
        for start in range(0, len(every), _LOOKUPS_TOGETHER):
            some = every[start : start + _LOOKUPS_TOGETHER]
            found = look_up([tokens for (tokens, _), _ in some], [salt for (_, salt), _ in some])
            gone.update((address, kv) for (address, kv), hit in zip(some, found, strict=True) if hit < len(address[0]))
        return gone

    def _let_go(self, address: Address) -> None:
        cache = self._caches.pop(address, None)
        self._bytes -= 0 if cache is None else cache.nbytes
