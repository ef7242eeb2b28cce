"""`LiveKVDataset`: prefixes as traffic fills a running server's cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from kvdata.client.connection import Connection
from kvdata.client.events import KVEventStream
from kvdata.client.selection import Index
from kvdata.datasets.chains import ChainCounts, Chains
from kvdata.datasets.kvcache import KVCacheDataset
from kvdata.datasets.prefixes import Prefixes, PrefixRecord
from kvdata.datasets.sample import Sample
from kvdata.errors import InvalidRequest, MissingKV
from kvdata.layout import KVLayout
from kvdata.wire.keys import check_salt

_IDLE_SECONDS = 1.0


@dataclass
class _Counts(ChainCounts):
    yielded: int = 0
    evicted: int = 0
    filtered: int = 0


class LiveKVDataset(IterableDataset[Sample]):
    """One sample per prefix that an engine computes into the server's cache, in the order in which they settle.

    Follows the KV events of an LMCache server (0.5.6 or newer), beginning with those in its log, so what it holds
    already comes first. Samples are `KVCacheDataset`'s; ``meta`` is ``{"salt": str}``, ``index`` a running number.

    Of a prompt only the whole is wanted, not each chunk on the way: a prefix is given out when nothing has followed
    its last chunk for ``settle_seconds``. One that grows later (the next turn of a conversation) comes again at its
    new length. The same prefix comes once in an iteration. Only the server knows the salt: the first of ``salts``
    under which it holds the whole prefix is taken. Caches that only kvdata stored cause no events.

    In a ``DataLoader`` each of N workers subscribes by itself and takes the prefixes whose hash modulo N is its number.
    Give the loader ``in_order=False``: else it waits for one worker's traffic while another has samples. Let the
    iteration end by itself: a worker that waits for traffic when its loader is dropped is killed by PyTorch after 5 s.
    Processes of a distributed training do not share: each sees all prefixes.

    Args:
        url, http_url, model_name, timeout, layout, packing, model_config: as in `Connection`; the timeout is also how
            long the server may be away.
        connection: all of these in one object.
        salts: candidates, in order.
        min_tokens, max_tokens: shorter and longer prefixes are passed over.
        settle_seconds: see above.
        max_samples: end after so many; of N workers, each after its N-th part.
        max_seconds: end after this time. With neither, an iteration never ends.
        max_chunks: chunks remembered at most (`Chains`); about 105 MB for 65,536 chunks of 256 tokens.
        layers, dtype, transform: as in `KVCacheDataset`.

    Raises, when it is iterated:
        UnsupportedServer: the server has no KV events.
        ServerError: it is away for longer than the timeout.
    """

    def __init__(
        self,
        url: str | None = None,
        http_url: str | None = None,
        model_name: str | None = None,
        timeout: float = 60.0,
        layout: KVLayout | None = None,
        packing: str = "auto",
        model_config: Mapping[str, Any] | str | Path | None = None,
        *,
        connection: Connection | None = None,
        salts: Sequence[str] = ("",),
        min_tokens: int = 0,
        max_tokens: int | None = None,
        settle_seconds: float = 1.0,
        max_samples: int | None = None,
        max_seconds: float | None = None,
        max_chunks: int = 65536,
        layers: Index = None,
        dtype: torch.dtype | None = None,
        transform: Callable[[Sample], Sample] | None = None,
    ) -> None:
        if isinstance(salts, str) or not salts:
            raise InvalidRequest("salts must be a sequence of at least one salt; '' is that of requests without one")
        for salt in salts:
            check_salt(salt)
        where = (url, http_url, model_name, timeout, layout, packing, model_config)
        self._reader = KVCacheDataset([], *where, connection=connection, layers=layers, dtype=dtype)
        self.connection = self._reader.connection
        self.salts = tuple(salts)
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.settle_seconds = settle_seconds
        self.max_samples = max_samples
        self.max_seconds = max_seconds
        self.max_chunks = max_chunks
        self.transform = transform
        self._counts = _Counts()
        self._chains()  # refuses bad arguments now

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        left = math.inf if self.max_samples is None else len(range(number, self.max_samples, workers))
        end = math.inf if self.max_seconds is None else time.monotonic() + self.max_seconds
        chains, index = self._chains(), number
        with closing(self._settled(chains, end)) as settled:
            while left > 0 and (digest := next(settled, None)) is not None:
                if int.from_bytes(digest[-8:], "big") % workers != number:
                    continue
                sample = self._sample(chains, digest)
                if sample is not None:
                    sample["index"], index, left = index, index + workers, left - 1
                    yield sample if self.transform is None else self.transform(sample)

    def stats(self) -> dict[str, int]:
        """Counts of this process's iterations: `ChainCounts`' (events, lost, ...), and what became of prefixes.

        ``yielded``; ``evicted``: gone from the server, in part or as a whole, or under none of the salts;
        ``filtered``: too short or too long. Those of other workers count only as events.
        """
        return asdict(self._counts)

    def close(self) -> None:
        """Un-register from the server and disconnect this process; the next sample connects anew."""
        self._reader.close()

    def _chains(self) -> Chains:
        return Chains(self.settle_seconds, self.max_chunks, self._counts)

    def _settled(self, chains: Chains, end: float) -> Generator[bytes, None, None]:
        """Prefixes as they settle, until ``end``. Between any two it takes in what events there are."""
        with KVEventStream(self.connection) as events:
            while (now := time.monotonic()) < end:
                digest = chains.settled(now)
                if digest is not None:
                    yield digest
                due = now if digest is not None else chains.next_due()
                wait = min(_IDLE_SECONDS, end - now, _IDLE_SECONDS if due is None else due - now)
                batch = events.poll(max(0.0, wait))
                if batch is not None:
                    chains.add(batch, time.monotonic())

    def _sample(self, chains: Chains, digest: bytes) -> Sample | None:
        length = chains.length(digest)
        if length < self.min_tokens or (self.max_tokens is not None and length > self.max_tokens):
            self._counts.filtered += 1
            return None
        sample = self._fetch(chains.tokens(digest))
        if sample is None:
            self._counts.evicted += 1
            chains.again(digest)
        else:
            self._counts.yielded += 1
        return sample

    def _fetch(self, tokens: np.ndarray) -> Sample | None:
        """A prefix under the first salt that has all of it; None when it is gone, be it between two calls."""
        lookup = self._reader.context.lookup
        salt = next((salt for salt in self.salts if lookup(tokens, salt) == len(tokens)), None)
        if salt is None:
            return None
        self._reader.prefixes = Prefixes([PrefixRecord(tokens, salt=salt, meta={"salt": salt})])
        try:
            sample: Sample = self._reader[0]
        except MissingKV:
            return None
        return sample
