"""Bringing an evicted prefix back: an engine computes its cache again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from kvdata.client.context import KVCacheContext
from kvdata.errors import MissingKV

# A completion: prompt token ids, sampling parameters, salt -> events, as `kvdata.engines.openai.openai_completion`.
Complete: TypeAlias = Callable[[list[int], dict[str, Any], str], Iterable[object]]


def prefill_through(complete: Complete, tokens: list[int], salt: str) -> None:
    """Have a serving engine compute a prefix's cache, for one token of its continuation."""
    for _ in complete(tokens, {"max_tokens": 1, "temperature": 0.0}, salt):
        pass


class GoneAgain(MissingKV):
    """What was computed again is gone before it could be read: evicted, or the server has restarted."""


@runtime_checkable
class Prefiller(Protocol):
    """Computes caches itself; `kvdata.engines.huggingface.HuggingFaceEngine` does."""

    def prefill(self, tokens: list[int]) -> Tensor:
        """``T`` token ids -> ``[2, L, T, D]``."""


class Refill:
    """Has an engine compute a prefix's cache and put it into the server, each prefix once at a time.

    Args:
        engine: a `Prefiller`, whose caches are stored here, or a completion, whose engine stores them itself.
        settle_seconds: how long to wait for what an engine stores after its answer.
    """

    def __init__(self, engine: Prefiller | Complete, settle_seconds: float = 20.0) -> None:
        self._engine = engine
        self._settle = settle_seconds
        self._locks: dict[int, threading.Lock] = {}
        self._guard = threading.Lock()

    def __call__(self, ctx: KVCacheContext, index: int, tokens: list[int], salt: str) -> int:
        """Tokens of the prefix that the server holds afterwards."""
        with self._guard:
            lock = self._locks.setdefault(index, threading.Lock())
        with lock:
            whole = ctx.whole_chunks(tokens)
            found = ctx.lookup(tokens, salt)
            if found >= whole:  # another thread has been here
                return found
            if isinstance(self._engine, Prefiller):
                ctx.store(self._engine.prefill(tokens[:whole]), tokens[:whole], salt)
                return ctx.lookup(tokens, salt)
            prefill_through(self._engine, tokens, salt)
            return ctx.wait_cached(tokens, salt, self._settle)

    def __reduce__(self) -> tuple[type[Refill], tuple[Any, float]]:
        return Refill, (self._engine, self._settle)
