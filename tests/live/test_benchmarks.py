"""The benchmarks on a real LMCache server, with its SDK, at tiny sizes: who is compared, and what is left behind."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.__main__ import measure
from benchmarks.rows import ROWS
from benchmarks.stack import Sizes, running
from kvdata import KVLayout

TINY = Sizes(KVLayout(num_layers=2, num_kv_heads=2, head_dim=16), chunk=32, prefix=64, samples=4, sample=64, lookups=4)


def shared_by_children() -> list[Path]:
    """Caches that processes of this test share with the server under a name that would outlive them."""
    names = [(path, Path("/proc", path.name.split("_")[2], "status")) for path in Path("/dev/shm").glob("lmcache_kv_*")]
    me = f"PPid:\t{os.getpid()}\n"
    return [path for path, status in names if status.exists() and me in status.read_text()]


def test_lmcaches_sdk_does_the_same_work_on_the_same_server():
    with running("lmcache", TINY) as stack:
        (engine, *_) = stack.server.status()["cache_context_meta"].values()
        assert engine["kv_cache_layout"]["kernel_groups"][0]["engine_kv_format"] == "NL_X_TWO_NB_BS_NH_HS"
        assert not shared_by_children()
        rows = list(measure(stack, list(ROWS), 1))
    assert [row["name"] for row in rows] == list(ROWS)
    assert all(row["upstream"] > 0 and row["vs_upstream"] > 0 for row in rows)
    assert not stack.server.pool.exists()
