"""`KVCacheDataset`: KV caches of a running server as a map-style PyTorch dataset."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from kvdata.client.connection import Connection
from kvdata.client.context import KVCacheContext
from kvdata.client.selection import Index, Selection
from kvdata.datasets.base import CacheDataset
from kvdata.datasets.buffers import Allocate
from kvdata.datasets.counters import Counters
from kvdata.datasets.prefixes import Prefixes, PrefixRecord
from kvdata.datasets.refill import Complete, GoneAgain, Prefiller, Refill
from kvdata.datasets.retry import TRANSIENT, with_retries
from kvdata.datasets.sample import Sample, make_sample
from kvdata.errors import InvalidRequest, KVCacheSDKError, MissingKV
from kvdata.layout import KVLayout

_LOOKUPS_TOGETHER = 64
_RETRIED = (*TRANSIENT, GoneAgain)
# A dataset that skips says so only after this many samples: a few missing ones in a row are no trend.
_SKIPS_ALLOWED = 16
# How many other prefixes are looked at for each one that is missing.
_SUBSTITUTES_TRIED = 32


@dataclass(frozen=True)
class Coverage:
    """How much of a dataset the server holds: indices of full hits, partial hits and misses."""

    hit: list[int] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        total = len(self.hit) + len(self.partial) + len(self.missing)
        return f"{len(self.hit)} of {total} cached, {len(self.partial)} partly, {len(self.missing)} missing"


class KVCacheDataset(CacheDataset):
    """One sample per prefix, its KV fetched from the server when asked for.

    A sample is ``{"kv": [2', L', T, D'], "tokens": [T], "index": int, "start": int, "hit_tokens": int,
    "continuation": [N], "salt": str, "meta": dict}``. Unless a ``window`` is asked for, ``start = 0`` and
    ``T = hit_tokens``, a whole number of chunks.

    The dataset holds no connection until its first item and pickles none: pass it to
    ``DataLoader(..., num_workers=N, collate_fn=kvdata.datasets.collate,
    worker_init_fn=kvdata.datasets.worker_init_fn)`` under any start method, or to a `KVLoader`.

    Args:
        prefixes: `Prefixes`, or what `Prefixes.of` takes. Their layout is used when none is given.
        url, http_url, model_name, timeout, layout, packing, model_config: as in `Connection`.
        connection: all of these in one object.
        cache_salt: salt of the records that carry none.
        on_missing: ``"raise"`` `MissingKV`; ``"skip"``: another cached prefix, no longer than the batch's longest,
            takes the missing one's place (the next in the dataset's order that no place of the batch has), so that
            batches stay full; ``"refill"``: ``refill`` computes it again.
        skip_limit: share of the samples that may be missing with ``"skip"``, over `_SKIPS_ALLOWED`; more raise.
        refill: engine for ``"refill"``: a `Refill`, or what it takes. DataLoader workers get a copy.
        retries: how often to repeat after a transient error of the server, waiting longer each time.
        min_hit_tokens: accept a partial hit of at least this many tokens; by default all whole chunks of
            the prefix must be there.
        layers, heads, window, kinds: as in `Selection`; only this part is copied.
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
        on_missing: Literal["raise", "skip", "refill"] = "raise",
        skip_limit: float = 0.5,
        refill: Refill | Prefiller | Complete | None = None,
        retries: int = 0,
        min_hit_tokens: int | None = None,
        layers: Index = None,
        heads: Index = None,
        window: slice | None = None,
        kinds: Sequence[str] = ("k", "v"),
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
        if on_missing not in ("raise", "skip", "refill"):
            raise InvalidRequest(f"on_missing must be 'raise', 'skip' or 'refill', got {on_missing!r}")
        if (on_missing == "refill") != (refill is not None):
            raise InvalidRequest("on_missing='refill' and refill=ENGINE belong together")
        self.connection = connection
        self.cache_salt = cache_salt
        self.on_missing = on_missing
        self.skip_limit = skip_limit
        self.refill = refill if refill is None or isinstance(refill, Refill) else Refill(refill)
        self.retries = retries
        self.min_hit_tokens = min_hit_tokens
        self.selection = Selection(layers, heads, window, kinds)
        self.dtype = dtype
        self.transform = transform
        self._counters = Counters()
        self._reset()

    def _reset(self) -> None:
        super()._reset()
        self.context = KVCacheContext(self.connection)  # lazy, fork-aware, and pickles as its connection

    def __len__(self) -> int:
        return len(self.prefixes)

    def _one(self, index: int) -> Sample:
        (sample,) = self.fetch([index], lambda shape, dtype: torch.empty(shape, dtype=dtype), substitutes=False)
        return sample

    def fetch(self, indices: Sequence[int], allocate: Allocate, substitutes: bool = True) -> list[Sample]:
        """A batch of samples whose ``kv`` are rows of the buffer that ``allocate(shape, dtype)`` returns.

        Raises `MissingKV` as ``on_missing`` says, and when nothing is left of the batch.
        """

        def attempt() -> list[Sample]:
            return self._fetch(indices, allocate, substitutes)

        return with_retries(attempt, self.retries, self._count_retry, _RETRIED)

    def _fetch(self, indices: Sequence[int], allocate: Allocate, substitutes: bool) -> list[Sample]:
        started, counts = time.perf_counter(), Counter[str]()
        try:
            samples = self._samples(indices, allocate, substitutes, counts)
        except _RETRIED:
            counts.clear()  # of each prefix only what is known in the end
            raise
        finally:
            self._counters.add(**counts)
        self._counters.add(samples=len(samples), fetch_seconds=time.perf_counter() - started)
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def _samples(
        self, indices: Sequence[int], allocate: Allocate, substitutes: bool, counts: Counter[str]
    ) -> list[Sample]:
        records = [self.prefixes[i] for i in indices]
        rows = list(allocate(*self._buffer(records)))
        wanted = dict(enumerate(zip(indices, records, strict=True)))
        samples = self._read(wanted, rows, counts)
        missing = {place: indices[place] for place in range(len(indices)) if place not in samples}
        if missing and self.on_missing == "refill":
            samples.update(self._refilled(missing, rows, counts))
        elif missing:
            counts["skipped"] += len(missing)
            self._check_skipped(counts)
            if substitutes:
                samples.update(self._substitutes(indices, missing, self._longest(records), rows, counts))
        if not samples:
            raise MissingKV(
                f"none of a batch's {len(indices)} prefixes is cached on {self.connection.http_url}; see coverage()"
            )
        return [samples[place] for place in sorted(samples)]

    def batch_bytes(self, indices: Sequence[int]) -> int:
        """Size of the buffer that `fetch` allocates for these indices."""
        shape, dtype = self._buffer([self.prefixes[i] for i in indices])
        return math.prod(shape) * dtype.itemsize

    def coverage(self) -> Coverage:
        """Look every prefix up, without reading any KV: what a training run would find now."""
        found = Coverage()
        for start in range(0, len(self), _LOOKUPS_TOGETHER):
            records = self.prefixes[start : start + _LOOKUPS_TOGETHER]
            hits = self.context.lookup_many([r.tokens for r in records], [self._salt(r) for r in records])
            for index, (record, hit) in enumerate(zip(records, hits, strict=True), start):
                complete = hit and hit >= self._needed(record)
                (found.hit if complete else found.partial if hit else found.missing).append(index)
        return found

    def stats(self) -> dict[str, float]:
        """Counts since the dataset was made, over this process and its DataLoader workers.

        ``samples`` delivered; ``hits``, ``partial_hits`` and ``misses`` of the prefixes asked for, each once however
        often it was tried; ``skipped`` and ``substituted``, ``refilled``; ``retries`` of batches and of `open`;
        ``bytes`` copied; ``fetch_seconds`` spent, summed over threads and workers, and ``gb_per_s``: bytes over these.
        """
        total = self._counters.total()
        return {**total, "gb_per_s": total["bytes"] / 1e9 / max(total["fetch_seconds"], 1e-9)}

    def open(self) -> None:
        """Connect now, with ``retries``; `worker_init_fn` calls it so that errors show up before the first batch."""
        with_retries(self._connect, self.retries, self._count_retry)

    def _connect(self) -> None:
        self.context.open()

    def _count_retry(self) -> None:
        self._counters.add(retries=1)

    def close(self) -> None:
        """Un-register from the server and disconnect this process; the next item connects anew."""
        self.context.close()
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("context", "_buffers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _salt(self, record: PrefixRecord) -> str:
        return record.salt_or(self.cache_salt)

    def _whole(self, record: PrefixRecord) -> int:
        """Tokens of a prefix's whole chunks."""
        return self.context.whole_chunks(record.tokens)

    def _longest(self, records: Sequence[PrefixRecord]) -> int:
        return max((self._whole(record) for record in records), default=0)

    def _buffer(self, records: Sequence[PrefixRecord]) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a batch of these prefixes."""
        layout = self.context.layout
        return (len(records), *self.selection.shape(layout, self._longest(records))), self.dtype or layout.dtype

    def _needed(self, record: PrefixRecord) -> int:
        whole = self._whole(record)
        return whole if self.min_hit_tokens is None else min(self.min_hit_tokens, whole)

    def _read(
        self,
        wanted: Mapping[int, tuple[int, PrefixRecord]],
        rows: Sequence[torch.Tensor],
        counts: Counter[str],
        counted: bool = True,
    ) -> dict[int, Sample]:
        """Samples of those that are cached, by place in the batch; ``wanted`` has index and record of each place."""
        places, records = list(wanted), [record for _, record in wanted.values()]
        hits: list[int] = []

        def targets(found: list[int]) -> list[torch.Tensor | None]:
            hits[:] = found
            accepted = [hit > 0 and hit >= self._needed(r) for hit, r in zip(found, records, strict=True)]
            return [rows[place] if good else None for place, good in zip(places, accepted, strict=True)]

        salts = [self._salt(record) for record in records]
        caches = self.context.retrieve_many([r.tokens for r in records], salts, self.selection, targets)
        if counted:
            self._count(hits, records, counts)
        samples = {}
        for (place, (index, record)), hit, kv in zip(wanted.items(), hits, caches, strict=True):
            if kv is not None:
                counts["bytes"] += kv.numel() * self.context.layout.dtype.itemsize
                samples[place] = make_sample(kv, index, record, hit, self._salt(record), self.selection)
            elif self.on_missing == "raise":
                raise self._missing(index, record, hit)
        return samples

    def _count(self, hits: Sequence[int], records: Sequence[PrefixRecord], counts: Counter[str]) -> None:
        whole = [self._whole(record) for record in records]
        counts.update(
            hits=sum(hit >= full for hit, full in zip(hits, whole, strict=True) if full),
            partial_hits=sum(0 < hit < full for hit, full in zip(hits, whole, strict=True)),
            misses=sum(not hit for hit in hits),
        )

    def _missing(self, index: int, record: PrefixRecord, hit: int) -> MissingKV:
        return MissingKV(
            f"prefix {index}: {hit} of {len(record.tokens)} tokens are cached on {self.connection.http_url} "
            f"({self._needed(record)} needed, salt {self._salt(record)!r}); ingest it again, allow less with "
            "min_hit_tokens=, or see on_missing="
        )

    def _refilled(
        self, missing: Mapping[int, int], rows: Sequence[torch.Tensor], counts: Counter[str]
    ) -> dict[int, Sample]:
        """The missing places (index by place), after an engine has computed them again."""
        assert self.refill is not None
        wanted = {place: (index, self.prefixes[index]) for place, index in missing.items()}
        for index, record in wanted.values():
            try:
                self.refill(self.context, index, record.tokens.tolist(), self._salt(record))
            except KVCacheSDKError as exc:
                kind = type(exc) if isinstance(exc, TRANSIENT) else MissingKV
                raise kind(f"prefix {index} was missing and could not be computed again: {exc}") from exc
        samples = self._read(wanted, rows, counts, counted=False)
        for place, (index, record) in wanted.items():
            if place not in samples:
                hit = self.context.lookup(record.tokens, self._salt(record))
                raise GoneAgain(f"after it was computed again, {self._missing(index, record, hit)}")
        counts["refilled"] += len(samples)
        return samples

    def _check_skipped(self, counts: Counter[str]) -> None:
        skipped = self._counters.own("skipped") + counts["skipped"]
        samples = sum(self._counters.own(name) + counts[name] for name in ("hits", "partial_hits", "misses"))
        if skipped > _SKIPS_ALLOWED and skipped > self.skip_limit * samples:
            raise MissingKV(
                f"{skipped:.0f} of {samples:.0f} samples are missing, more than skip_limit={self.skip_limit:g} allows: "
                "ingest the prefixes again, or give the server more memory: see coverage()"
            )

    def _substitutes(
        self,
        indices: Sequence[int],
        missing: Mapping[int, int],
        longest: int,
        rows: Sequence[torch.Tensor],
        counts: Counter[str],
    ) -> dict[int, Sample]:
        """Other cached prefixes for the missing places (index by place), as far as there are some."""
        taken, found = set(indices), dict[int, Sample]()
        candidates = {place: self._others(index, longest, taken) for place, index in missing.items()}
        while len(found) < len(missing):
            wanted = {}
            for place in missing:
                if place not in found and (index := next(candidates[place], None)) is not None:
                    wanted[place] = (index, self.prefixes[index])
            if not wanted:
                break
            found.update(self._read(wanted, rows, counts, counted=False))
        counts["substituted"] += len(found)
        return found

    def _others(self, index: int, longest: int, taken: set[int]) -> Iterator[int]:
        """Indices after ``index`` that no place has tried yet; marks each as taken."""
        for step in range(1, min(len(self), _SUBSTITUTES_TRIED + 1)):
            other = (index + step) % len(self)
            if other not in taken and 0 < self._whole(self.prefixes[other]) <= longest:
                taken.add(other)
                yield other
