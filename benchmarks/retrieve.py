"""How fast KV comes out of a server: ``python benchmarks/retrieve.py``, or ``make bench``.

One prefix of 4,096 tokens in the geometry of an 8B model (36 layers, D = 1024, bf16: 604 MB) is stored in an
embedded server and retrieved into a fresh tensor and into a reused buffer, against a plain copy between two such
buffers in the same run. Prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

from kvdata import Connection, KVLayout
from kvdata.server import EmbeddedServer

LAYOUT = KVLayout(num_layers=36, num_kv_heads=8, head_dim=128)
TOKENS, CHUNK, ROUNDS = 4096, 256, 7


def seconds(action: Callable[[], object]) -> float:
    """Median of `ROUNDS` runs after one to warm up."""
    action()
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    kv = torch.randn(2, LAYOUT.num_layers, TOKENS, LAYOUT.hidden).to(LAYOUT.dtype)
    tokens = list(range(TOKENS))
    buffer = torch.empty_like(kv)
    gigabytes = kv.numel() * kv.element_size() / 1e9
    with EmbeddedServer(chunk_size=CHUNK, pool_bytes=2 << 30) as server:
        connection = Connection(server.url, server.http_url, "bench/8b", layout=LAYOUT)
        with connection.connect() as ctx:
            ctx.store(kv, tokens)
            fresh = seconds(lambda: ctx.retrieve(tokens))
            reused = seconds(lambda: ctx.retrieve(tokens, out=buffer))
            lookup = seconds(lambda: ctx.lookup(tokens))
            memcpy = seconds(lambda: buffer.copy_(kv))
            assert torch.equal(ctx.retrieve(tokens, out=buffer), kv)
    row = {
        "benchmark": "retrieve",
        "gigabytes": round(gigabytes, 3),
        "memcpy_gb_s": round(gigabytes / memcpy, 2),
        "retrieve_fresh_gb_s": round(gigabytes / fresh, 2),
        "retrieve_reused_gb_s": round(gigabytes / reused, 2),
        "reused_vs_memcpy": round(memcpy / reused, 2),
        "lookup_ms": round(1e3 * lookup, 2),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
