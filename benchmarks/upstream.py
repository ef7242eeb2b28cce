"""LMCache's own SDK at work; runs in the environment of an ``lmcache`` command, which has no kvdata.

Reads one JSON line per piece of work from its standard input, ``{"operation", "url", "http_url", "model", ...}``, and
answers each with ``{"seconds"}`` or ``{"error"}``. Connecting and making data are not timed.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from lmcache.sdk import kvcache
from lmcache.sdk.context import LMCacheSDKContext
from torch.utils.data import DataLoader, Dataset

TIMEOUT = 60.0
Place = tuple[str, str, str]  # url, http_url, model


@cache
def connect(place: Place) -> LMCacheSDKContext:
    return kvcache.connect(*place, timeout=TIMEOUT)


class NaiveDataset(Dataset[torch.Tensor]):
    """What a user would write: the SDK behind ``__getitem__``, connected where it is first used."""

    def __init__(self, place: Place, prefixes: Sequence[Sequence[int]]) -> None:
        self.place, self.prefixes = place, prefixes

    def __len__(self) -> int:
        return len(self.prefixes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return hit(connect(self.place).retrieve(self.prefixes[index]), len(self.prefixes[index]))


def hit(kv: torch.Tensor | None, tokens: int) -> torch.Tensor:
    if kv is None or kv.shape[2] != tokens:
        raise RuntimeError(f"the SDK found {0 if kv is None else kv.shape[2]} of {tokens} tokens")
    return kv


def retrieve(place: Place, tokens: Sequence[int], layer: int | None = None) -> float:
    """A prefix, or one layer of it: the SDK fetches all of them."""
    ctx = connect(place)
    started = time.perf_counter()
    kv = hit(ctx.retrieve(tokens), len(tokens))
    if layer is not None:
        kv = kv[:, layer : layer + 1]
    return time.perf_counter() - started


def store(place: Place, tokens: Sequence[int], layers: int, hidden: int) -> float:
    ctx, kv = connect(place), made(layers, len(tokens), hidden)
    started = time.perf_counter()
    if not ctx.store(kv, tokens):
        raise RuntimeError("the SDK stored nothing")
    return time.perf_counter() - started


@cache
def made(layers: int, tokens: int, hidden: int) -> torch.Tensor:
    return torch.zeros(2, layers, tokens, hidden, dtype=torch.bfloat16).normal_()


def lookup(place: Place, prefixes: Sequence[Sequence[int]], release_timed: bool) -> float:
    """Lookup and check, one prefix after the other, and giving back what that holds on the server."""
    ctx = connect(place)
    seconds = 0.0
    for tokens in prefixes:
        request = f"lookup-{uuid.uuid4().hex}"
        started = time.perf_counter()
        found = look(ctx, request, tokens)
        looked = time.perf_counter()
        give_back(ctx, request, tokens)
        seconds += (time.perf_counter() if release_timed else looked) - started
        if found != len(tokens):
            raise RuntimeError(f"the SDK found {found} of {len(tokens)} tokens")
    return seconds


def give_back(ctx: LMCacheSDKContext, request: str, tokens: Sequence[int]) -> None:
    """Locks and session; the SDK has no method for the locks of a lookup that no retrieve follows."""
    key = ctx._create_key(list(tokens), 0, len(tokens), request).no_worker_id_version()
    ctx._req_client.free_lookup_locks(key, 1).result(timeout=TIMEOUT)
    ctx.end_session(request)


def look(ctx: LMCacheSDKContext, request: str, tokens: Sequence[int]) -> int:
    ctx.maybe_submit_lookup_request(request, list(tokens))
    while (found := ctx.check_lookup_result(request)) is None:
        time.sleep(0.001)
    return found


_loaders: dict[tuple[Place, int], DataLoader[torch.Tensor]] = {}


def epoch(place: Place, prefixes: Sequence[Sequence[int]], batch_size: int, workers: int) -> float:
    """One epoch of a DataLoader over `NaiveDataset`; its workers stay from one to the next."""
    if (place, workers) not in _loaders:
        more = {"persistent_workers": True, "multiprocessing_context": "spawn"} if workers else {}
        dataset = NaiveDataset(place, prefixes)
        _loaders[place, workers] = DataLoader(dataset, batch_size=batch_size, num_workers=workers, **more)
    started = time.perf_counter()
    samples = sum(len(batch) for batch in _loaders[place, workers])
    seconds = time.perf_counter() - started
    if samples != len(prefixes):
        raise RuntimeError(f"{samples} samples of {len(prefixes)}")
    return seconds


def release() -> float:
    """End the workers of all loaders."""
    _loaders.clear()
    return 0.0


OPERATIONS: dict[str, Callable[..., float]] = {
    work.__name__: work for work in (retrieve, store, lookup, epoch, release)
}


def answer(line: str) -> dict[str, Any]:
    try:
        job = json.loads(line)
        work = OPERATIONS[job.pop("operation")]
        place = [(job.pop("url"), job.pop("http_url"), job.pop("model"))] if job else []
        return {"seconds": work(*place, **job)}
    except Exception as exc:  # the other side raises it
        return {"error": f"{type(exc).__name__}: {exc}"}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)
