"""What datasets of caches have in common: batches in buffers that are used again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from kvdata.datasets.buffers import Allocate, Buffers
from kvdata.datasets.ring import worker_ring
from kvdata.datasets.sample import Sample


class CacheDataset(Dataset[Sample], ABC):
    """A map-style dataset whose batches are rows of one buffer."""

    def _reset(self) -> None:
        """Begin in this process."""
        self._buffers = Buffers()

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any:
        """One sample; or a batch of them for a list of indices, as a DataLoader without ``batch_size`` asks."""
        return self.__getitems__(index) if isinstance(index, Sequence) else self._one(index)

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """A batch of samples whose ``kv`` are views of one buffer; `collate` then copies nothing."""
        return self.fetch(indices, self._buffers if get_worker_info() is None else worker_ring())

    @abstractmethod
    def fetch(self, indices: Sequence[int], allocate: Allocate) -> list[Sample]:
        """A batch of samples whose ``kv`` are rows of the buffer that ``allocate(shape, dtype)`` returns."""

    @abstractmethod
    def batch_bytes(self, indices: Sequence[int]) -> int:
        """Size of the buffer that `fetch` allocates for these indices."""

    @abstractmethod
    def _one(self, index: int) -> Sample: ...
