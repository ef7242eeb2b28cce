"""Forks, start methods, pickling: who owns a connection, and that nothing of it is left."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from kvdata import Connection, KVCacheContext, KVCacheDataset, collate, worker_init_fn
from kvdata.errors import InvalidRequest, MissingKV
from tests.conformance.conftest import LAYOUT, MODEL, fresh_tokens, random_kv


def filled(ctx, count: int = 6, tokens: int = 128):
    prompts = [fresh_tokens(tokens) for _ in range(count)]
    caches = [random_kv(tokens) for _ in prompts]
    for prompt, kv in zip(prompts, caches, strict=True):
        ctx.store(kv, prompt)
    return prompts, caches


def connection(server, **changes) -> Connection:
    return Connection(server.url, server.http_url, MODEL, 20.0, LAYOUT, **changes)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_loader_delivers_every_sample_under_each_start_method(connect, server, method):
    ctx = connect()
    prompts, caches = filled(ctx)
    dataset = KVCacheDataset(prompts, connection=connection(server))
    assert len(dataset[0]["kv"][0]) == 3  # the parent is connected when the workers start
    loader = DataLoader(
        Subset(dataset, range(6)),
        batch_size=2,
        num_workers=2,
        collate_fn=collate,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    for _ in range(2):
        for batch in loader:
            for row, index in enumerate(batch.index.tolist()):
                assert torch.equal(batch.kv[row], caches[index])
                assert batch.tokens[row].tolist() == prompts[index]
    dataset.close()
    iterator = loader._iterator
    workers = iterator._workers
    iterator._shutdown_workers()
    assert not any(worker.is_alive() for worker in workers)
    ctx.close()  # what is still registered now was left by a worker: see the fixture


def test_worker_errors_arrive_typed_in_the_parent(connect, server):
    prompts, _ = filled(connect())
    dataset = KVCacheDataset([*prompts, fresh_tokens(128)], connection=connection(server))
    loader = DataLoader(dataset, batch_size=7, num_workers=1, collate_fn=collate, worker_init_fn=worker_init_fn)
    iterator = iter(loader)
    with pytest.raises(MissingKV, match="prefix 6: 0 of 128 tokens are cached"):
        next(iterator)
    iterator._shutdown_workers()


def test_a_forked_child_gets_a_connection_of_its_own(connect, server):
    ctx = connect()
    tokens, kv = fresh_tokens(64), random_kv(64)
    ctx.store(kv, tokens)
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = torch.equal(ctx.retrieve(tokens), kv) and len(server.status()["non_cuda_context_meta"]) == 2
            ctx.close()
        finally:
            os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(ctx.retrieve(tokens), kv)


def _closed(ctx: KVCacheContext) -> bool:
    ctx.close()
    with pytest.raises(InvalidRequest, match="closed"):
        ctx.open()
    return True


@pytest.mark.parametrize(
    "alone",
    [lambda ctx: ctx.settle() is None, lambda ctx: not any(ctx.stats().values()), _closed],
    ids=["settle", "stats", "close"],
)
def test_a_forked_child_leaves_the_parents_connection_alone(connect, alone):
    """Also where it was forked while another thread of the parent was connecting."""
    ctx = connect()
    tokens, kv = fresh_tokens(64), random_kv(64)
    ctx.store(kv, tokens)
    held, done = threading.Event(), threading.Event()

    def connecting() -> None:
        with ctx._sessions._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=connecting)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        ok = False
        try:
            signal.alarm(20)
            ok = alone(ctx)
        finally:
            os._exit(0 if ok else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(ctx.retrieve(tokens), kv)
    assert ctx.stats()["handshakes"] == 1


def test_pickling_carries_the_connection_and_nothing_live(connect):
    ctx = connect()
    tokens, kv = fresh_tokens(64), random_kv(64)
    ctx.store(kv, tokens)
    copy = pickle.loads(pickle.dumps(ctx))
    assert copy.connection == ctx.connection
    assert copy.stats()["handshakes"] == 0
    assert torch.equal(copy.retrieve(tokens), kv)
    copy.close()


def test_a_context_that_is_dropped_unregisters(connect, server):
    ctx = connection(server).connect()
    assert len(server.status()["non_cuda_context_meta"]) == 1
    del ctx
    assert server.status()["non_cuda_context_meta"] == {}


def test_contexts_leave_no_file_descriptor_and_no_thread(connect, server):
    with connection(server).connect() as ctx:  # what is made once per process is made here
        ctx.lookup(fresh_tokens(64))
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        with connection(server).connect() as ctx:
            ctx.store(random_kv(64), fresh_tokens(64))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert "lmcache_l1_pool" not in Path("/proc/self/maps").read_text()


def test_threads_share_a_context(connect):
    ctx = connect()
    prompts, caches = filled(ctx, count=8)
    wrong = []

    def read(number: int) -> None:
        for i in range(8):
            which = (number + i) % 8
            if not torch.equal(ctx.retrieve(prompts[which]), caches[which]):
                wrong.append(which)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert ctx.stats()["hits"] == 64
