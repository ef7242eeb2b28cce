"""An engine in 20 lines that stores what it 'computes', for tests of streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvdata import KVCacheContext
from kvdata.sdk.batch import LMCacheBatchedStream
from kvdata.sdk.stream import LMCacheStream, TokenEvent
from tests.unit.conftest import LAYOUT

CHUNK = 32


def kv_of(tokens: list[int]) -> torch.Tensor:
    """Another cache for every sequence, the same each time."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    return torch.randn(2, LAYOUT.num_layers, len(tokens), LAYOUT.hidden, generator=generator).to(LAYOUT.dtype)


class Engine:
    """Stores the cache of whole chunks it is asked to go on from, as vLLM with LMCache does, and counts up."""

    def __init__(self, ctx: KVCacheContext) -> None:
        self.ctx = ctx
        self.requests: list[tuple[list[int], dict[str, Any], str]] = []

    def __call__(self, prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[TokenEvent]:
        self.requests.append((prompt, params, salt))
        if len(prompt) >= CHUNK and not self.ctx.lookup(prompt, salt):
            self.ctx.store(kv_of(prompt), prompt, salt)
        for place in range(params["max_tokens"]):
            yield TokenEvent(900 + place, f"<{place}>")


def batch_of(*streams: LMCacheStream, **options: Any) -> LMCacheBatchedStream:
    batch = LMCacheBatchedStream(settle_seconds=0, **options)
    for stream in streams:
        batch.add(stream)
    return batch


class Halve:
    """A built-in-like edit: keeps the first half, under a salt of its own."""

    def derive(self, kv, tokens, chunk_size, cache_salt):
        kept = len(tokens) // 2 // chunk_size * chunk_size
        return kv[:, :, :kept] * 2, tokens[:kept], cache_salt + "~half"
