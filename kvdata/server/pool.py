"""Which bytes of a server's memory are taken."""

from __future__ import annotations

import bisect

import torch

ALIGNMENT = 4096


class Pool:
    """First-fit allocation with coalescing, in whole 4 KiB pages. ``memory`` is a flat uint8 tensor."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.size = memory.numel()
        self.used = 0
        self._free = [(0, self.size)]  # (offset, length), by offset, never adjacent
        self._taken: dict[int, int] = {}

    def allocate(self, length: int, count: int) -> list[int] | None:
        """Offsets of ``count`` pieces of ``length`` bytes, or None when not all of them fit."""
        pages = -(-length // ALIGNMENT) * ALIGNMENT
        offsets: list[int] = []
        for _ in range(count):
            i = next((i for i, (_, free) in enumerate(self._free) if free >= pages), None)
            if i is None:
                for taken in offsets:
                    self.release(taken)
                return None
            offset, free = self._free[i]
            self._free[i : i + 1] = [(offset + pages, free - pages)] if free > pages else []
            self._taken[offset] = pages
            self.used += pages
            offsets.append(offset)
        return offsets

    def release(self, offset: int) -> None:
        """Give one piece back."""
        length = self._taken.pop(offset)
        self.used -= length
        i = bisect.bisect_left(self._free, (offset, 0))
        if i < len(self._free) and self._free[i][0] == offset + length:
            length += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == offset:
            i -= 1
            before, size = self._free.pop(i)
            offset, length = before, size + length
        self._free.insert(i, (offset, length))

    def close(self) -> None:
        """Let go of the memory."""
        self.memory = torch.empty(0, dtype=torch.uint8)
