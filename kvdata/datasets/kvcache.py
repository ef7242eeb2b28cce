"""`KVCacheDataset`: KV caches of a running server as a map-style PyTorch dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from kvdata.client.connection import Connection
from kvdata.client.context import KVCacheContext
from kvdata.client.selection import Index
from kvdata.datasets.prefixes import Prefixes, PrefixRecord
from kvdata.datasets.sample import Sample, make_sample
from kvdata.errors import InvalidRequest, MissingKV
from kvdata.layout import KVLayout


@dataclass(frozen=True)
class Coverage:
    """How much of a dataset the server holds: indices of full hits, partial hits and misses."""

    hit: list[int] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        total = len(self.hit) + len(self.partial) + len(self.missing)
        return f"{len(self.hit)} of {total} cached, {len(self.partial)} partly, {len(self.missing)} missing"


class KVCacheDataset(Dataset[Sample]):
    """One sample per prefix, its KV fetched from the server when asked for.

    A sample is ``{"kv": [2, L', T, D], "tokens": [T], "index": int, "hit_tokens": int,
    "continuation": [N], "meta": dict}`` where ``T = hit_tokens`` is a whole number of chunks.

    The dataset holds no connection until its first item and pickles none: pass it to
    ``DataLoader(..., num_workers=N, collate_fn=kvdata.datasets.collate,
    worker_init_fn=kvdata.datasets.worker_init_fn)`` under any start method.

    Args:
        prefixes: `Prefixes`, or what `Prefixes.of` takes. Their layout is used when none is given.
        url, http_url, model_name, timeout, layout, packing, model_config: as in `Connection`.
        connection: all of these in one object.
        cache_salt: salt of the records that carry none.
        on_missing: ``"raise"`` `MissingKV`, or ``"skip"`` the item within its batch.
        min_hit_tokens: accept a partial hit of at least this many tokens; by default all whole chunks of
            the prefix must be there.
        layers: layer indices or a slice; only these are copied.
        dtype: convert the samples' KV to this dtype.
        transform: function of a sample, applied last, in the worker.
    """

    def __init__(
        self,
        prefixes: Prefixes | Iterable[Any],
        url: str | None = None,
        http_url: str | None = None,
        model_name: str | None = None,
        timeout: float = 60.0,
        layout: KVLayout | None = None,
        packing: str = "auto",
        model_config: Mapping[str, Any] | str | Path | None = None,
        *,
        connection: Connection | None = None,
        cache_salt: str = "",
        on_missing: Literal["raise", "skip"] = "raise",
        min_hit_tokens: int | None = None,
        layers: Index = None,
        dtype: torch.dtype | None = None,
        transform: Callable[[Sample], Sample] | None = None,
    ) -> None:
        self.prefixes = Prefixes.of(prefixes)
        model_name = model_name or self.prefixes.model_name
        if connection is None:
            if url is None or http_url is None or model_name is None:
                raise InvalidRequest("KVCacheDataset needs url, http_url and model_name, or connection=")
            connection = Connection(url, http_url, model_name, timeout, layout, packing, model_config)
        elif url is not None or http_url is not None:
            raise InvalidRequest("give either connection= or url and http_url, not both")
        if connection.layout is None and self.prefixes.layout is not None:
            connection = replace(connection, layout=self.prefixes.layout)
        if on_missing not in ("raise", "skip"):
            raise InvalidRequest(f"on_missing must be 'raise' or 'skip', got {on_missing!r}")
        self.connection = connection
        self.cache_salt = cache_salt
        self.on_missing = on_missing
        self.min_hit_tokens = min_hit_tokens
        self.layers = layers
        self.dtype = dtype
        self.transform = transform
        self.context = KVCacheContext(connection)  # lazy, fork-aware, and pickles as its connection

    def __len__(self) -> int:
        return len(self.prefixes)

    def __getitem__(self, index: int) -> Sample:
        sample = self._fetch(index, self.prefixes[index], None)
        if sample is None:
            raise MissingKV(f"prefix {index} is not cached; on_missing='skip' drops items only within a batch")
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """A batch of samples whose ``kv`` are views of one buffer; `collate` then copies nothing."""
        records = [self.prefixes[i] for i in indices]
        chunk = self.context.chunk_size
        longest = max((len(r.tokens) // chunk * chunk for r in records), default=0)
        layout = self.context.layout
        layers = layout.num_layers if self.layers is None else len(_selected(self.layers, layout.num_layers))
        buffer = torch.empty(len(records), 2, layers, longest, layout.hidden, dtype=self.dtype or layout.dtype)
        samples: list[Sample] = []
        for index, record in zip(indices, records, strict=True):
            sample = self._fetch(index, record, buffer[len(samples)])
            if sample is not None:
                samples.append(sample)
        if not samples:
            raise MissingKV(
                f"none of a batch's {len(indices)} prefixes is cached on {self.connection.http_url}; see coverage()"
            )
        return samples

    def coverage(self) -> Coverage:
        """Look every prefix up, without reading any KV: what a training run would find now."""
        found = Coverage()
        for index, record in enumerate(self.prefixes):
            hit = self.context.lookup(record.tokens, self._salt(record))
            complete = hit and hit >= self._needed(record)
            (found.hit if complete else found.partial if hit else found.missing).append(index)
        return found

    def open(self) -> None:
        """Connect now; `worker_init_fn` calls it so that errors show up before the first batch."""
        self.context.open()

    def close(self) -> None:
        """Un-register from the server and disconnect this process; the next item connects anew."""
        self.context.close()
        self.context = KVCacheContext(self.connection)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "context"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.context = KVCacheContext(self.connection)

    def _salt(self, record: PrefixRecord) -> str:
        return record.salt_or(self.cache_salt)

    def _needed(self, record: PrefixRecord) -> int:
        chunk = self.context.chunk_size
        whole = len(record.tokens) // chunk * chunk
        return whole if self.min_hit_tokens is None else min(self.min_hit_tokens, whole)

    def _fetch(self, index: int, record: PrefixRecord, out: torch.Tensor | None) -> Sample | None:
        kv = self.context.retrieve(record.tokens, self._salt(record), layers=self.layers, out=out)
        hit = 0 if kv is None else kv.shape[2]
        if kv is None or hit < self._needed(record):
            if self.on_missing == "skip":
                return None
            raise MissingKV(
                f"prefix {index}: {hit} of {len(record.tokens)} tokens are cached on {self.connection.http_url} "
                f"({self._needed(record)} needed, salt {self._salt(record)!r}); ingest it again, allow less with "
                "min_hit_tokens=, or on_missing='skip'"
            )
        return make_sample(record, index, kv if self.dtype is None else kv.to(self.dtype), hit, self.transform)


def _selected(layers: Sequence[int] | slice, count: int) -> Sequence[int]:
    return range(count)[layers] if isinstance(layers, slice) else layers
