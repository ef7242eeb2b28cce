"""What is reported without a mark: the other packings, first touch of the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Trial, compare, memcpy, timed, undone
from benchmarks.stack import Stack
from kvdata import Connection

# Makes a `measure.row` from a stack and the number of repeats.
Figure = Callable[[Stack, int], dict[str, Any]]

BLOCK_SIZE = 128  # of vLLM's CPU backend


def _packed(stack: Stack, packing: str) -> Connection:
    """To a model that no engine has registered, whose K and V are not apart."""
    layout = stack.sizes.layout.with_packing(packing, min(BLOCK_SIZE, stack.sizes.chunk))
    return Connection(stack.server.url, stack.server.http_url, f"bench/{packing}", layout=layout)


def packed_retrieve(packing: str) -> Figure:
    """`rows.retrieve` in another packing."""

    def figure(stack: Stack, repeats: int) -> dict[str, Any]:
        tokens, out = stack.tokens(stack.sizes.prefix), torch.zeros_like(stack.kv)
        with _packed(stack, packing).connect() as ctx:
            ctx.store(stack.kv, tokens)
            work = timed(lambda: ctx.retrieve(tokens, out=out))
            trial = Trial(stack.gigabytes(len(tokens)), "GB/s", work, limit=memcpy(stack.kv))
            found = compare(trial, repeats)
            assert torch.equal(out, stack.kv)
            ctx.delete(tokens)
        return found

    return figure


def packed_store(packing: str) -> Figure:
    """`rows.store` in another packing."""

    def figure(stack: Stack, repeats: int) -> dict[str, Any]:
        tokens = stack.tokens(stack.sizes.prefix)
        with _packed(stack, packing).connect() as ctx:
            work = undone(timed(lambda: ctx.store(stack.kv, tokens)), lambda: ctx.delete(tokens))
            trial = Trial(stack.gigabytes(len(tokens)), "GB/s", work, limit=memcpy(stack.kv, shared=True))
            return compare(trial, repeats)

    return figure


def first_touch(prefault: bool) -> Figure:
    """`rows.store` by a process that has just connected, with or without touching the pool at connect."""

    def figure(stack: Stack, repeats: int) -> dict[str, Any]:
        connection, tokens = stack.connection(prefault=prefault), stack.tokens(stack.sizes.prefix)

        def store() -> float:
            with connection.connect() as ctx:
                return undone(timed(lambda: ctx.store(stack.kv, tokens)), lambda: ctx.delete(tokens))()

        limit = memcpy(stack.kv, shared=True)
        return compare(Trial(stack.gigabytes(len(tokens)), "GB/s", store, limit=limit), repeats)

    return figure


def connecting(prefault: bool) -> Figure:
    """Connecting and un-registering, with or without touching the pool."""

    def figure(stack: Stack, repeats: int) -> dict[str, Any]:
        connection = stack.connection(prefault=prefault)
        return compare(Trial(1, "connects/s", timed(lambda: connection.connect().close())), repeats)

    return figure


FIGURES: dict[str, Figure] = {
    "retrieve_fused": packed_retrieve("fused"),
    "retrieve_vllm_cpu": packed_retrieve("vllm-cpu"),
    "store_fused": packed_store("fused"),
    "store_vllm_cpu": packed_store("vllm-cpu"),
    "store_first_touch": first_touch(prefault=False),
    "store_prefaulted": first_touch(prefault=True),
    "connect": connecting(prefault=False),
    "connect_prefault": connecting(prefault=True),
}
