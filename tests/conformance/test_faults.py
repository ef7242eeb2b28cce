"""Full pools, vanished, silent and restarted servers: the right error in time, and life goes on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from kvdata import Connection, KVCacheDataset, KVLayout, collate
from kvdata.client.http import Http
from kvdata.errors import MissingKV, PoolFull, PoolNotMappable, ServerError, ServerTimeout, ServerUnreachable
from tests.conformance.conftest import check_clean, delete_is_refused, fresh_tokens, random_kv

BIG = KVLayout(num_layers=8, num_kv_heads=8, head_dim=64)  # 1 MiB a chunk of 64 tokens: 20 fill the pool
MODEL = "tests/big"


def connection(server) -> Connection:
    return Connection(server.url, server.http_url, MODEL, 30.0, BIG)


def test_full_pool_evicts_the_oldest_but_never_what_is_leased(own_server):
    with connection(own_server).connect() as ctx:
        leased, kv = fresh_tokens(128), random_kv(128, BIG)
        ctx.store(kv, leased)
        others = [fresh_tokens(128) for _ in range(16)]
        with ctx.lease(leased) as chunks:
            for other in others:
                assert ctx.store(random_kv(128, BIG), other) is True
            assert ctx.lookup(leased) == 128
            assert torch.equal(torch.cat([c.flatten(3) for c in chunks], dim=2), kv)
        assert ctx.lookup(others[0]) == 0
        assert ctx.lookup(others[-1]) == 128
        assert ctx.stats()["stored_chunks"] == 34
    check_clean(own_server)


def test_nothing_is_read_once_its_lock_is_gone(own_server):
    """Writers overwrite whatever is evicted, all the time: what is read is what was stored, or is a miss."""
    prompts = [fresh_tokens(128) for _ in range(3)]
    caches = [random_kv(128, BIG) for _ in prompts]
    found = {"whole": 0, "part": 0, "miss": 0}
    stop = threading.Event()

    def write() -> None:
        with connection(own_server).connect() as ctx:
            while not stop.is_set():
                with contextlib.suppress(PoolFull):
                    ctx.store(random_kv(128, BIG), fresh_tokens(128))

    writer = threading.Thread(target=write)
    with connection(own_server).connect() as ctx:
        writer.start()
        try:
            deadline, pause = time.monotonic() + 90, 0.01
            while min(found["whole"], found["miss"]) < 3 and time.monotonic() < deadline:
                for kv, wanted in zip(ctx.retrieve_many(prompts), caches, strict=True):
                    found["miss" if kv is None else "whole" if kv.shape[2] == 128 else "part"] += 1
                    assert kv is None or torch.equal(kv, wanted[:, :, : kv.shape[2]])
                for prompt, wanted in zip(prompts, caches, strict=True):
                    if ctx.lookup(prompt) < 128:
                        pause = 0.01
                        with contextlib.suppress(PoolFull):
                            ctx.store(wanted, prompt)
                time.sleep(pause)  # what is read often is not evicted
                pause *= 2
        finally:
            stop.set()
            writer.join()
    assert min(found["whole"], found["miss"]) >= 3, found
    check_clean(own_server)


def test_a_store_that_can_never_fit_says_so(own_server):
    with connection(own_server).connect() as ctx:
        with pytest.raises(PoolFull, match="--l1-size-gb"):
            ctx.store(random_kv(64 * 24, BIG), fresh_tokens(64 * 24))
        tokens, kv = fresh_tokens(64), random_kv(64, BIG)
        assert ctx.store(kv, tokens) is True
        assert torch.equal(ctx.retrieve(tokens), kv)
    check_clean(own_server)


def test_a_full_pool_of_leased_chunks_is_an_error_until_they_are_released(own_server):
    with connection(own_server).connect() as ctx:
        held = fresh_tokens(64 * 15)
        ctx.store(random_kv(64 * 15, BIG), held)
        more, kv = fresh_tokens(64 * 6), random_kv(64 * 6, BIG)
        with ctx.lease(held), pytest.raises(PoolFull, match="evicted none in time"):
            ctx.store(kv, more)
        if not delete_is_refused(own_server, ctx, held):
            ctx.delete(held)
            assert ctx.store(kv, more) is True
    check_clean(own_server)


def test_restart_between_two_batches(own_server):
    """Killed and started again, the pool has its name again but other memory: no stale bytes, no rebuilding."""
    prompts = [fresh_tokens(128) for _ in range(4)]
    caches = [random_kv(128, BIG) for _ in prompts]
    with connection(own_server).connect() as ctx:
        for prompt, kv in zip(prompts, caches, strict=True):
            ctx.store(kv, prompt)
        dataset = KVCacheDataset(prompts, connection=connection(own_server))
        assert torch.equal(dataset.__getitems__([0, 1])[1]["kv"], caches[1])
        own_server.kill()
        own_server.start()
        assert ctx.lookup(prompts[0]) == 0  # a miss of the new server, not an error of the old connection
        for prompt, kv in zip(prompts, caches, strict=True):
            assert ctx.store(kv, prompt) is True
        batch = dataset.__getitems__([2, 3])
        assert torch.equal(batch[0]["kv"], caches[2])
        assert torch.equal(batch[1]["kv"], caches[3])
        assert ctx.stats()["handshakes"] == 2
        dataset.close()
    check_clean(own_server)


def test_restart_under_a_loader_with_workers(own_server):
    """The next batch arrives or fails typed and in time; the dataset goes on without being rebuilt."""
    prompts = [fresh_tokens(64) for _ in range(6)]
    caches = [random_kv(64, BIG) for _ in prompts]

    def fill() -> None:
        with connection(own_server).connect() as ctx:
            for prompt, kv in zip(prompts, caches, strict=True):
                ctx.store(kv, prompt)

    fill()
    dataset = KVCacheDataset(prompts, connection=connection(own_server))
    loader = DataLoader(dataset, batch_size=1, num_workers=1, prefetch_factor=1, collate_fn=collate, timeout=30)
    batches = iter(loader)
    assert torch.equal(next(batches).kv[0], caches[0])
    own_server.kill()
    own_server.start()
    fill()
    try:  # a worker that fetched ahead while the server was down has failed, any other batch arrives
        for batch in batches:
            assert torch.equal(batch.kv[0], caches[int(batch.index)])
    except (ServerUnreachable, MissingKV):
        pass
    batches._shutdown_workers()  # or PyTorch keeps them after an error, see KVDataLoader
    batches = iter(loader)
    own_server.kill()
    with pytest.raises((ServerUnreachable, MissingKV)):
        list(batches)
    batches._shutdown_workers()
    own_server.start()
    fill()
    delivered = {int(b.index): b.kv[0] for b in loader}
    assert all(torch.equal(delivered[i], kv) for i, kv in enumerate(caches))
    check_clean(own_server)


def test_a_server_that_is_gone_is_named_and_the_context_recovers(own_server):
    tokens, kv = fresh_tokens(64), random_kv(64, BIG)
    with connection(own_server).connect() as ctx:
        ctx.store(kv, tokens)
        own_server.kill()
        started = time.monotonic()
        with pytest.raises(ServerUnreachable, match=own_server.http_url):
            ctx.retrieve(tokens)
        with pytest.raises(ServerUnreachable):
            ctx.store(kv, tokens)
        assert time.monotonic() - started < 20
        own_server.start()
        assert ctx.retrieve(tokens) is None
        assert ctx.store(kv, tokens) is True
        assert torch.equal(ctx.retrieve(tokens), kv)
    check_clean(own_server)


def test_a_silent_server_is_a_timeout_that_names_the_operation(own_server):
    tokens, kv = fresh_tokens(64), random_kv(64, BIG)
    with connection(own_server).connect() as ctx:
        ctx.store(kv, tokens)
        assert torch.equal(ctx.retrieve(tokens), kv)  # whose release the server may not have read when it freezes
        patient, ctx.connection = ctx.connection, replace(ctx.connection, timeout=1.0)
        own_server.freeze()
        started = time.monotonic()
        try:
            with pytest.raises(ServerTimeout, match="lookup"):
                ctx.retrieve(tokens)
            with pytest.raises(ServerError):
                ctx.store(kv, fresh_tokens(64))
            assert time.monotonic() - started < 20
        finally:
            own_server.thaw()
        ctx.connection = patient
        assert torch.equal(ctx.retrieve(tokens), kv)
    # What the server found in its sockets when it woke up, it does, and in the end nothing is left of it.
    deadline = time.monotonic() + 20
    while own_server.memory()["read_locked_count"] or own_server.status()["active_sessions"]:
        assert time.monotonic() < deadline, "read locks or sessions were left"
        time.sleep(0.1)
    check_clean(own_server)


def test_a_pool_that_cannot_be_mapped_says_what_to_do(own_server):
    pool = Path(f"/dev/shm/lmcache_l1_pool_{own_server.shm_name}")
    aside = pool.rename(pool.with_name(pool.name + "-aside"))
    with pytest.raises(PoolNotMappable, match="--ipc=host"):
        connection(own_server).connect()
    aside.rename(pool)
    check_clean(own_server)
    with connection(own_server).connect() as ctx:
        assert ctx.store(random_kv(64, BIG), fresh_tokens(64)) is True


def test_nobody_there_names_the_url():
    nobody = Connection("tcp://127.0.0.1:1", "http://127.0.0.1:1", "m", 1.0, BIG)
    with pytest.raises(ServerUnreachable, match=r"http://127\.0\.0\.1:1.*HTTP"):
        nobody.connect()


def test_a_connection_that_the_server_closes_when_it_is_used_again_is_replaced():
    """Servers close connections that were idle for 5 s: now and then, that is when the next request is sent."""
    answer = b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n"0.5.6"'

    def serve(listener: socket.socket) -> None:
        for requests in (2, 1):
            with listener.accept()[0] as client:
                for left in reversed(range(requests)):
                    client.recv(4096)
                    if left or requests == 1:
                        client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        http = Http(f"http://127.0.0.1:{listener.getsockname()[1]}", 10.0)
        assert [http.json("GET", "/lmc_version") for _ in range(2)] == ["0.5.6"] * 2
        http.close()
        thread.join(10)


def test_a_wrong_zmq_port_names_the_zmq_url(own_server):
    with pytest.raises(ServerUnreachable, match=r"tcp://127\.0\.0\.1:1 \(ZMQ"):
        Connection("tcp://127.0.0.1:1", own_server.http_url, "m", 1.0, BIG).connect()
