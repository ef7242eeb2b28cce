"""Each thing that can be wrong is found at its own step, and the sentence says what mends it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

import kvdata.client.session
from kvdata import Connection
from kvdata.client.discovery import registrations
from kvdata.client.doctor import Check, diagnose
from kvdata.errors import PoolNotMappable
from kvdata.server import EmbeddedServer
from tests.unit.conftest import LAYOUT
from tests.unit.test_beside_an_engine import Engine

FUSED = {
    "engine_kv_format": "NL_X_NB_BS_NH_CS",
    "engine_kv_concrete_shape": "Unknown (EngineKVFormat.NL_X_NB_BS_NH_CS)",
}
CONFIG = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}


def failure(connection: Connection) -> Check:
    *well, last = diagnose(connection)
    assert all(check.ok for check in well)
    assert not last.ok
    return last


@pytest.fixture
def not_lmcache() -> Iterator[str]:
    """Some other HTTP server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_all_is_well(connection):
    checks = list(diagnose(connection))
    assert [check.name for check in checks] == [
        "HTTP",
        "version",
        "mode",
        "ZMQ",
        "model",
        "layout",
        "packing",
        "memory",
        "round trip",
    ]
    assert all(check.ok for check in checks)
    assert "GB/s" in checks[-1].detail


def test_no_server(connection):
    found = failure(replace(connection, http_url="http://127.0.0.1:1"))
    assert found.name == "HTTP"
    assert "--http-port" in found.detail


def test_another_server_at_the_http_port(connection, not_lmcache):
    found = failure(replace(connection, http_url=not_lmcache))
    assert found.name == "HTTP"
    assert "is this an LMCache server?" in found.detail


@pytest.mark.parametrize(
    ("page", "answer", "step", "says"),
    [
        ("/lmc_version", "0.3.1", "version", "needs 0.4.7 or newer"),
        ("/config", {"mp": {"chunk_size": 32, "supported_transfer_mode": "lmcache_driven"}}, "mode", "mode auto"),
        ("/config", {"mp": {"chunk_size": 32, "transport": "grpc"}}, "mode", "--transport zmq"),
    ],
)
def test_a_server_that_cannot_serve_us(connection, monkeypatch, page, answer, step, says):
    plain = kvdata.client.discovery.Http.json

    def patched(http, method, *paths, **options):
        return answer if page in paths else plain(http, method, *paths, **options)

    monkeypatch.setattr("kvdata.client.discovery.Http.json", patched)
    found = failure(connection)
    assert found.name == step
    assert says in found.detail


def test_nobody_at_the_zmq_port(connection):
    found = failure(replace(connection, url="tcp://127.0.0.1:1", timeout=1.0))
    assert found.name == "ZMQ"
    assert "--port" in found.detail


@pytest.fixture
def engine(embedded: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    running = Engine(embedded, "path/of/the/model", monkeypatch, **FUSED)
    yield running
    running.stop()


def test_the_served_name_instead_of_the_registered_one(embedded, engine):
    found = failure(Connection(embedded.url, embedded.http_url, "smol"))
    assert found.name == "model"
    assert "The only engine's is 'path/of/the/model'" in found.detail
    assert "--served-model-name" in found.detail


def test_an_unknown_packing_and_unknown_heads(embedded, engine, tmp_path, monkeypatch):
    monkeypatch.setenv("KVDATA_CACHE", str(tmp_path))  # nothing has been verified here
    where = Connection(embedded.url, embedded.http_url, "path/of/the/model", model_config=CONFIG)
    found = failure(where)
    assert found.name == "packing"
    assert "kvdata verify" in found.detail
    found = failure(replace(where, packing="fused", model_config=None))
    assert found.name == "layout"
    assert "config.json" in found.detail


def test_memory_that_cannot_be_mapped(connection, monkeypatch):
    def refuse(*_: object) -> None:
        raise PoolNotMappable("no such pool; --ipc=host")

    monkeypatch.setattr(kvdata.client.session, "MappedPool", refuse)
    found = failure(connection)
    assert found.name == "memory"
    assert "--ipc=host" in found.detail


def test_status_lists_who_is_registered(embedded, engine, connection):
    with connection.connect():
        status = httpx.get(embedded.http_url + "/status", trust_env=False).json()
    found = {entry.model_name: entry for entry in registrations(status)}
    assert found["path/of/the/model"].by == "engine"
    assert "NL_X_NB_BS_NH_CS, 3 layers" in found["path/of/the/model"].cache
    assert found[connection.model_name].by == "client"
    # The stand-in hides the layouts that the embedded server remembers, as the real server has none.
    assert found[connection.model_name].cache == "not published"


def test_status_names_what_the_embedded_server_remembers(embedded, connection):
    with connection.connect():
        held = registrations(httpx.get(embedded.http_url + "/status", trust_env=False).json())
    left = registrations(httpx.get(embedded.http_url + "/status", trust_env=False).json())
    assert [(e.model_name, e.by, e.cache) for e in held] == [("unit/model", "client", str(LAYOUT))]
    assert [(e.model_name, e.by, e.cache) for e in left] == [("unit/model", "nobody now", str(LAYOUT))]
