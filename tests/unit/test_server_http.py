"""HTTP face, life cycle and process behaviour of the embedded server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvdata.errors import InvalidRequest, ServerError
from kvdata.server import EmbeddedServer
from kvdata.wire.shm import POOL_PREFIX, SHM_FOLDER
from tests.unit.test_server_wire import CHUNK, Raw, key, new_tokens, registration, store

SERVE = "from kvdata.server import EmbeddedServer as E; E(shm_name={!r}).run_forever(lambda: print('up', flush=True))"


def get(server: EmbeddedServer, path: str) -> object:
    return httpx.get(server.http_url + path).json()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    name = f"kvdata-unit-{os.getpid()}-http"  # the leak check after each test looks for automatic names
    with EmbeddedServer(chunk_size=CHUNK, pool_bytes=1 << 20, shm_name=name) as running:
        yield running


@pytest.fixture
def fresh() -> Iterator[tuple[EmbeddedServer, Raw]]:
    """A server of the test's own, and a client registered as instance 1."""
    with EmbeddedServer(chunk_size=CHUNK, pool_bytes=1 << 20) as running:
        client = Raw(running.url)
        client.call("register", registration())
        yield running, client
        client.close()


def test_version_health_and_config(server):
    assert get(server, "/lmc_version") == "0.5.6"
    assert get(server, "/healthcheck") == {"status": "healthy"}
    config = get(server, "/config")
    assert config["mp"]["supported_transfer_mode"] == "engine_driven"
    assert (config["mp"]["transport"], config["mp"]["chunk_size"]) == ("zmq", CHUNK)
    assert config["storage_manager"]["l1_manager_config"] == {"write_ttl_seconds": 600, "read_ttl_seconds": 300}
    with EmbeddedServer(pool_bytes=1 << 16) as other:
        assert get(other, "/config")["mp"]["instance_id"] != config["mp"]["instance_id"]


def test_status_lists_instances_sessions_and_remembered_layouts(fresh):
    server, raw = fresh
    full = {"num_kv_heads": 2, "head_dim": 4, "packing": "split"}
    raw.call("register", registration(5, model_name="known", **full))
    raw.call("register", registration(6, model_name="kvdata/private", **full))
    raw.call("register", registration(7, model_name="inconsistent", **{**full, "head_dim": 5}))
    raw.call("register", registration(8, model_name="unknown packing", **{**full, "packing": "x"}))
    raw.call("lookup", key(new_tokens(1), "open", worker_id=None), 1)
    status = get(server, "/status")
    assert status["registered_non_cuda_instance_ids"] == [1, 5, 6, 7, 8]
    assert status["non_cuda_context_meta"]["5"] == {
        "model_name": "known", "world_size": 1, "block_size": 16, "use_mla": False,
    }  # fmt: skip
    assert status["active_sessions"] == 1
    assert status["worker_liveness"]["tracked_instances"] == 5
    assert status["cache_context_meta"]["known"]["published_by"] == "kvdata"  # for LMCache's own SDK: see conformance
    assert len(status["cache_context_meta"]) == 1
    layout = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "dtype": "bfloat16", "packing": "split"}
    assert status["kvdata_layouts"] == {"known": layout}
    raw.call("unregister", 5)
    raw.call("end", "open")
    status = get(server, "/status")
    assert status["kvdata_layouts"] == {"known": layout}
    assert status["active_sessions"] == 0
    assert "5" not in status["non_cuda_context_meta"]


def test_metrics_count_like_the_real_server(fresh):
    server, raw = fresh

    def metrics() -> list[str]:
        return [line for line in httpx.get(server.http_url + "/metrics").text.splitlines() if line[0] != "#"]

    assert metrics() == []
    tokens = new_tokens(2)
    store(raw, tokens)
    assert metrics() == ['lmcache_mp_l1_write_chunks_total{l1_tag="_default"} 2.0']
    raw.lookup(tokens, "r")
    raw.call("prepare_retrieve", key(tokens, "r"), 1)
    assert len(metrics()) == 1  # a read is counted when its lock is released
    raw.call("commit_retrieve", key(tokens, "r"), 1)
    store(raw, tokens, cache_salt='a"b\n')
    raw.call("clear", True)
    assert metrics() == [
        'lmcache_mp_l1_write_chunks_total{cache_salt="",l1_tag="_default"} 2.0',
        'lmcache_mp_l1_write_chunks_total{cache_salt="a\\"b\\n",l1_tag="_default"} 2.0',
        'lmcache_mp_l1_read_chunks_total{l1_tag="_default"} 2.0',
        'lmcache_mp_l1_evicted_chunks_total{cache_salt="",l1_tag="_default"} 2.0',
        'lmcache_mp_l1_evicted_chunks_total{cache_salt="a\\"b\\n",l1_tag="_default"} 2.0',
    ]


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("POST", "/cache/clear", b"", 200),
        ("POST", "/cache/clear", b'{"tier":"l2"}', 400),
        ("POST", "/cache/clear", b'{"force":"maybe"}', 422),
        ("POST", "/cache/clear", b"not json", 422),
        ("DELETE", "/cache/objects", b'{"keys":[]}', 503),
        ("DELETE", "/cache/objects", b'{"tier":"l1","keys":[{}]}', 422),
        ("DELETE", "/cache/objects", b'{"tier":"l1","keys":[{"chunk_hash_hex":"z","model_name":"","kv_rank":1}]}', 400),
        ("GET", "/no/such/path", b"", 404),
        ("GET", "/env", b"", 404),
    ],
)  # fmt: skip
def test_http_refusals(server, method, path, body, code):
    assert httpx.request(method, server.http_url + path, content=body).status_code == code
    assert get(server, "/healthcheck") == {"status": "healthy"}


def descriptors() -> set[str]:
    return {os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()}


@pytest.mark.parametrize("transfer", ["shm", "pickle"])
def test_stop_leaves_nothing_behind(transfer):
    with EmbeddedServer(pool_bytes=1 << 20):
        pass  # what libraries open once and keep
    before, threads = descriptors(), threading.active_count()
    server = EmbeddedServer(pool_bytes=1 << 20, transfer=transfer, chunk_size=CHUNK).start()
    assert server.start() is server
    client = Raw(server.url)
    client.call("register", registration())
    assert httpx.get(server.http_url + "/status").status_code == 200
    client.close()
    server.stop()
    server.stop()
    assert threading.active_count() == threads
    assert descriptors() <= before
    assert not [p for p in SHM_FOLDER.iterdir() if p.name == server.shm_name]
    assert transfer == "pickle" or server.shm_name not in Path("/proc/self/maps").read_text()
    EmbeddedServer(server.port, server.http_port, pool_bytes=1 << 20).start().stop()  # the ports are free again


def test_what_is_taken_is_a_clear_error_and_leaves_nothing_behind():
    before = descriptors()
    with EmbeddedServer(pool_bytes=1 << 20, shm_name=f"kvdata-unit-{os.getpid()}") as server:
        assert server.shm_name == f"{POOL_PREFIX}kvdata-unit-{os.getpid()}"
        with pytest.raises(ServerError, match="in use by another server; choose another"):
            EmbeddedServer(shm_name=server.shm_name).start()
        with pytest.raises(ServerError, match="take another port"):
            EmbeddedServer(port=server.port).start()
        with pytest.raises(ServerError, match="take another http_port"):
            EmbeddedServer(http_port=server.http_port).start()
        with pytest.raises(ServerError, match=r"do not fit.*smaller pool"):
            EmbeddedServer(pool_bytes=1 << 60).start()
        assert get(server, "/healthcheck") == {"status": "healthy"}
    with pytest.raises(InvalidRequest, match="letters"):
        EmbeddedServer(shm_name="../x").start()
    with pytest.raises(InvalidRequest, match="transfer"):
        EmbeddedServer(transfer="rdma")
    assert {d for d in descriptors() - before if "shm" in d} == set()


def test_a_process_cleans_up_on_sigterm_and_after_a_kill_the_next_start_does():
    name = f"kvdata-unit-{os.getpid()}"
    path, foreign = SHM_FOLDER / (POOL_PREFIX + name), SHM_FOLDER / f"{POOL_PREFIX}kvdata-foreign-{os.getpid()}"
    foreign.write_bytes(bytes(8192))  # like a segment of the real server: not locked, but not ours either

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", SERVE.format(name)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    try:
        with start() as process:
            process.kill()
        assert path.exists()
        with EmbeddedServer(pool_bytes=1 << 20) as server:  # of any name
            assert server.shm_name != path.name
            assert not path.exists()
        assert foreign.exists()
        with start() as process:
            assert path.stat().st_mode & 0o777 == 0o600
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        assert not path.exists()
    finally:
        foreign.unlink()
        path.unlink(missing_ok=True)


def test_a_signal_that_reaches_another_thread_ends_it_too():
    script = """if True:
        import signal, threading, time
        from kvdata.server import EmbeddedServer

        def strike():
            time.sleep(1.0)  # the main thread waits by then
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        EmbeddedServer().run_forever(threading.Thread(target=strike).start)
    """
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_forked_child_does_not_take_the_server_down(server):
    pid = os.fork()
    if pid == 0:
        server.stop()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (SHM_FOLDER / server.shm_name).exists()
    assert get(server, "/healthcheck") == {"status": "healthy"}


def test_no_wait_for_the_network_in_an_answer(server):
    with httpx.Client() as client:
        client.get(server.http_url + "/healthcheck")
        started = time.monotonic()
        for _ in range(20):
            client.get(server.http_url + "/healthcheck")
        assert time.monotonic() - started < 0.6  # 20 delayed acknowledgements would take 0.8 s
