"""Which samples make which batch, on which rank: the same everywhere, and resumable in the middle of an epoch.

An epoch is one list of batches for all ranks together, made from the seed and the epoch's number alone. Rank ``r`` of
``W`` takes every ``W``-th batch of what is left of it, so all ranks take equally many steps, and a run that was
interrupted goes on at the same sample with another number of ranks or workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.utils.data import DistributedSampler

from kvdata.errors import InvalidRequest

STATE_VERSION = 1
# Batches of like lengths are made within so many shuffled samples: enough to choose from, and still a shuffle.
_BUCKET_WINDOW = 4096


class KVBatchSampler(DistributedSampler[list[int]]):
    """Batches of indices for this rank; give it to a loader as its ``sampler`` (a DataLoader's ``batch_size=None``).

    With more than one rank, some batches at the end of an epoch are repeated from its beginning where they don't share
    out evenly (with ``drop_last``, left out).

    Args:
        dataset: anything with a length; a `KVCacheDataset`'s prefixes are part of the state.
        batch_size: samples in a batch, on each rank.
        shuffle: a new order in each epoch.
        drop_last: leave the incomplete last batch out.
        max_tokens: batches of prefixes of like length instead, ``batch size x longest`` at most so many tokens.
        seed: of the shuffle.
        num_replicas, rank: by default those of `torch.distributed` when an epoch begins.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        max_tokens: int | None = None,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if batch_size < 1 or (max_tokens is not None and max_tokens < 1):
            raise InvalidRequest(f"batches need a positive size, got {batch_size=} and {max_tokens=}")
        if (num_replicas is None) != (rank is None) or not 0 <= (rank or 0) < (num_replicas or 1):
            raise InvalidRequest(f"rank must be one of num_replicas, got {rank=} and {num_replicas=}")
        # Not DistributedSampler's own set-up: it asks for the rank now, when there may be none yet.
        self.dataset: Any = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.max_tokens = max_tokens
        self.seed = seed
        self.epoch = 0
        self._place = (num_replicas, rank)
        self._cursor = 0  # samples of this epoch that all ranks together have had
        self._steps = 0  # that a rank took for them
        self._taken = 0  # and those after them
        if max_tokens is not None and not hasattr(dataset, "prefixes"):
            raise InvalidRequest("max_tokens needs a dataset with prefixes, to know their lengths")

    def __iter__(self) -> Iterator[list[int]]:
        world, rank = self._world()
        return iter(self._shared_out(world)[rank::world])

    def __len__(self) -> int:
        """Steps of this epoch, those before an interruption included."""
        world, _ = self._world()
        return self._steps + len(self._shared_out(world)) // world

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on in it when it is the one that was interrupted."""
        if epoch != self.epoch:
            self.epoch, self._cursor, self._steps, self._taken = epoch, 0, 0, 0

    def finish(self) -> None:
        """This epoch is over."""
        self.set_epoch(self.epoch + 1)

    def taken(self, batches: Iterator[Any]) -> Iterator[Any]:
        """One pass over the epoch's batches, counted as they are handed out; the last one ends the epoch."""
        self._taken = 0
        for batch in batches:
            self._taken += 1
            yield batch
            del batch  # its memory may be the consumer's alone
        self.finish()

    def state_dict(self) -> dict[str, Any]:
        """Epoch and sample at which a resumed run goes on: behind the last batch that `taken` handed out."""
        world, _ = self._world()
        left, steps = self._left(), self._taken
        had = left[: steps * world]
        if steps and len(had) == len(left):
            epoch, cursor, before = self.epoch + 1, 0, 0
        else:
            epoch, cursor, before = self.epoch, self._cursor + sum(map(len, had)), self._steps + steps
        return {"version": STATE_VERSION, "epoch": epoch, "cursor": cursor, "steps": before, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` said; `InvalidRequest` when that was over other prefixes or in another order."""
        if state.get("version") != STATE_VERSION:
            raise InvalidRequest(
                f"sampler state of version {state.get('version')!r}; this kvdata reads version {STATE_VERSION}"
            )
        mine = self._identity()
        changed = [name for name, value in mine.items() if state.get(name) != value]
        if changed:
            raise InvalidRequest(
                f"the interrupted run had another {', '.join(changed)}: resume with the same prefixes, shuffle, "
                "seed and max_tokens, or begin anew without its checkpoint"
            )
        self.epoch, self._cursor, self._steps, self._taken = state["epoch"], state["cursor"], state["steps"], 0
        self._left()

    def _identity(self) -> dict[str, Any]:
        """What decides the order of samples, and of which."""
        prefixes = getattr(self.dataset, "prefixes", None)
        return {
            "prefixes": prefixes.digest() if prefixes is not None else None,
            "length": len(self.dataset),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
        }

    def _world(self) -> tuple[int, int]:
        world, rank = self._place
        if world is not None and rank is not None:
            return world, rank
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_world_size(), torch.distributed.get_rank()
        return 1, 0

    def _shared_out(self, world: int) -> list[list[int]]:
        """What is left of the epoch's batches, as many as ranks can share evenly."""
        left = self._left()
        uneven = len(left) % world
        if self.drop_last:
            return left[: len(left) - uneven]
        every = left or self._batches(0)
        return left + [every[i % len(every)] for i in range((world - uneven) % world)]

    def _left(self) -> list[list[int]]:
        """Batches behind the cursor."""
        if self.max_tokens is None:
            return self._batches(self._cursor)
        batches = self._batches(0)
        ends = np.cumsum([0] + [len(batch) for batch in batches])
        place = int(np.searchsorted(ends, self._cursor))
        if ends[place] != self._cursor:
            raise InvalidRequest(f"no batch begins at sample {self._cursor}: was the run batched in another way?")
        return batches[place:]

    def _batches(self, start: int) -> list[list[int]]:
        """Batches of this epoch, for all ranks, from a sample on."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        count = len(self.dataset)
        order = torch.randperm(count, generator=generator).numpy() if self.shuffle else np.arange(count)
        if self.max_tokens is not None:
            return self._alike(order, generator)
        size = self.batch_size
        batches = [order[at : at + size].tolist() for at in range(start, count, size)]
        return batches[:-1] if self.drop_last and batches and len(batches[-1]) < size else batches

    def _alike(self, order: np.ndarray, generator: torch.Generator) -> list[list[int]]:
        """Batches of prefixes of like length, within the token budget, in random order if shuffled."""
        lengths = self.dataset.prefixes.lengths()
        batches: list[list[int]] = []
        for at in range(0, len(order), _BUCKET_WINDOW):
            window = order[at : at + _BUCKET_WINDOW]
            batches += _within(window[np.argsort(lengths[window], kind="stable")], lengths, self.max_tokens or 0)
        if not self.shuffle:
            return batches
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


class Resumable:
    """What makes a loader over a `KVBatchSampler` resumable."""

    sampler: Any

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on in it; without it, each whole pass is followed by the next epoch."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and sample at which a resumed run goes on: behind the last batch that was handed out."""
        state: dict[str, Any] = self.sampler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there in the next pass, on any number of ranks, threads or workers."""
        self.sampler.load_state_dict(state)


def _within(ordered: Sequence[int] | np.ndarray, lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Cut indices, sorted by length, into batches of at most ``max_tokens`` padded tokens."""
    batches: list[list[int]] = []
    for index in map(int, ordered):
        length = int(lengths[index])
        if length > max_tokens:
            raise InvalidRequest(f"prefix {index} has {length} tokens, more than max_tokens={max_tokens}")
        if batches and (len(batches[-1]) + 1) * length <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
