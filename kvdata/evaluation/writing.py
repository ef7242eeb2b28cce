"""Compressed caches through the server: stored under derived addresses, read back, and removed again.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``K`` kept tokens, ``D = num_kv_heads * head_dim``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kvdata.client.context import KVCacheContext
from kvdata.edits.address import compressed_address
from kvdata.errors import InvalidRequest, MissingKV, StoreConflict
from kvdata.evaluation.methods import Method
from kvdata.evaluation.runs import FULL
from kvdata.evaluation.subject import Subject


@dataclass(frozen=True)
class Job:
    """One cache to be made: a method at one budget (share asked for, tokens it comes to)."""

    method: Method
    keep: float
    kept: int

    def about(self, window: int, kv: Tensor) -> dict[str, Any]:
        """The fields of `Measured` for a cache ``[2, L, K, D]`` that it made."""
        method = self.method
        return {
            "window": window,
            "policy": method.name,
            "revision": method.revision,
            "keep": self.keep,
            "kept_tokens": kv.shape[2],
            "sees": method.sees.value,
            "trained": method.trained,
        }


@dataclass(frozen=True)
class Stored:
    """A compressed cache as the server gave it back.

    Attributes:
        kv: ``[2, L, K, D]``.
        tokens, salt: where it is stored.
        seconds: ``inputs``, ``score``, ``write``, ``read``.
    """

    job: Job
    kv: Tensor = field(repr=False)
    tokens: list[int] = field(repr=False)
    salt: str
    seconds: dict[str, float]


def by_size(caches: Sequence[Stored]) -> Iterator[tuple[list[Stored], Tensor]]:
    """Neighbours of one size, and their caches as ``[B, 2, L, K, D]``."""
    for _, neighbours in groupby(caches, key=lambda cache: cache.kv.shape[2]):
        same = list(neighbours)
        yield same, torch.stack([cache.kv for cache in same])


def about_full(window: int, tokens: int) -> dict[str, Any]:
    """The fields of `Measured` for a full cache."""
    return {"window": window, "policy": FULL, "revision": "", "keep": 1.0, "kept_tokens": tokens}


@contextmanager
def through_server(ctx: KVCacheContext, subject: Subject, salt: str, jobs: Sequence[Job]) -> Iterator[list[Stored]]:
    """Compress `subject` by every job and store it; yields what the server holds then.

    What this call stored is deleted at the end of the block, so that a server of any size holds an evaluation.

    Args:
        salt: of the full cache.

    Raises:
        StoreConflict: an address holds another cache.
        MissingKV: a cache did not survive until it was read back.
    """
    with ExitStack() as cleaning:
        yield [_store(ctx, subject, salt, job, cleaning) for job in jobs]


def _store(ctx: KVCacheContext, subject: Subject, salt: str, job: Job, cleaning: ExitStack) -> Stored:
    method = job.method
    source = subject.source(method.sees)
    started = time.perf_counter()
    with torch.inference_mode():
        kv = method.compress(subject.kv, job.kept, source).to(ctx.layout.dtype)
    scored = time.perf_counter()
    if kv.shape[2] % ctx.chunk_size:
        raise InvalidRequest(f"{method.name} kept {kv.shape[2]} tokens, which are no whole chunks of {ctx.chunk_size}")
    tokens, address = compressed_address(subject.ids, kv.shape[2], method.name, method.revision, salt)
    found, seconds = store_and_read(ctx, kv, tokens, address, cleaning)
    seconds |= {"inputs": subject.inputs_seconds(method.sees), "score": scored - started}
    return Stored(job, found, tokens, address, seconds)


def store_and_read(
    ctx: KVCacheContext, kv: Tensor, tokens: list[int], salt: str, cleaning: ExitStack
) -> tuple[Tensor, dict[str, float]]:
    """Store a cache and read it back: what the server gives, and the seconds of ``write`` and ``read``.

    A new cache is deleted when `cleaning` ends. Errors as `through_server`.
    """
    started = time.perf_counter()
    new = ctx.store(kv, tokens, salt)
    written = time.perf_counter()
    if new:
        cleaning.callback(ctx.delete, tokens, salt)
    found = ctx.retrieve(tokens, salt)
    ended = time.perf_counter()
    if found is None or found.shape != kv.shape:
        raise MissingKV(
            f"a cache of {len(tokens)} tokens stored under salt {salt!r} was gone when it was read back; give the "
            "server more memory"
        )
    if not torch.equal(found, kv):
        raise StoreConflict(
            f"salt {salt!r} holds another cache of the same source, of an earlier run; delete it "
            "(KVCacheContext.delete), or give the method a new revision"
        )
    return found, {"write": written - started, "read": ended - written}
