"""Where the time of one operation goes: ``python -m benchmarks.stages [embedded|lmcache]``.

Milliseconds of each stage, medians: the server's operations as the client sees them, the copy, and all else in Python.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.stack import Sizes, Stack, running
from kvdata.client import reading, transfer
from kvdata.client.rpc import Rpc

ROUNDS = 30
Seconds = dict[str, float]


@contextmanager
def watched(spent: Seconds) -> Iterator[None]:
    """Add up what calls to the server and copies take."""
    calls, posts, copies = Rpc.call_many, Rpc.post, reading.copy_all

    def timed(name: str, action: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return action(*arguments)
        finally:
            spent[name] += time.perf_counter() - started

    def call_many(self: Rpc, many: Any, *rest: Any) -> Any:
        return timed(many[0].operation if many else "nothing", calls, self, many, *rest)

    def post(self: Rpc, *arguments: Any) -> Any:
        return timed("releases, sent", posts, self, *arguments)

    def copy_all(pairs: Any) -> Any:
        return timed("copy", copies, pairs)

    with (
        patch.object(Rpc, "call_many", call_many),
        patch.object(Rpc, "post", post),
        patch.object(reading, "copy_all", copy_all),
        patch.object(transfer, "copy_all", copy_all),
    ):
        yield


def stages(action: Callable[[], object], undo: Callable[[], object] = lambda: None) -> Seconds:
    """Median seconds of each stage of an action, and of the whole of it."""
    rounds: list[Seconds] = []
    for _ in range(ROUNDS):
        spent: Seconds = defaultdict(float)
        with watched(spent):
            started = time.perf_counter()
            action()
            spent["whole"] = time.perf_counter() - started
        spent["Python"] = 2 * spent["whole"] - sum(spent.values())
        rounds.append(spent)
        undo()
    names = list(dict.fromkeys(name for spent in rounds for name in spent))
    return {name: median(spent[name] for spent in rounds) for name in sorted(names, key="whole".__eq__)}


def operations(stack: Stack) -> Iterator[tuple[str, Seconds]]:
    """The operations that are looked into."""
    ctx, small, sizes = stack.ctx, stack.small, stack.sizes
    tokens, out = stack.prefix, torch.zeros_like(stack.kv)
    yield "memcpy of a prefix", {"whole": median(_seconds(lambda: out.copy_(stack.kv)) for _ in range(ROUNDS))}
    yield f"retrieve {sizes.prefix} tokens", stages(lambda: ctx.retrieve(tokens, out=out))
    one = torch.zeros_like(stack.kv[:, :1])
    yield "one layer of it", stages(lambda: ctx.retrieve(tokens, layers=[3], out=one))
    fresh = stack.tokens(sizes.prefix)
    yield "store it", stages(lambda: ctx.store(stack.kv, fresh), lambda: ctx.delete(fresh))
    prefixes = [stack.tokens(sizes.sample) for _ in range(sizes.lookups)]
    for ids in prefixes:
        small.store(torch.zeros(2, 1, sizes.sample, 16, dtype=torch.bfloat16), ids)
    yield f"look {len(prefixes)} prefixes up", stages(lambda: small.lookup_many(prefixes))


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else "lmcache"
    table = Table("operation", "stage", "ms", title=f"Stages, {kind} server")
    with running(kind, Sizes(), with_upstream=False) as stack:
        for name, found in operations(stack):
            for stage, seconds in found.items():
                table.add_row(name, stage, f"{1e3 * seconds:.2f}")
            table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
