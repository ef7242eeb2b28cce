"""What a server publishes of a model, and what is made of it."""

from __future__ import annotations

import json

import httpx
import pytest

from kvdata import Connection, KVLayout
from kvdata.client.discovery import discover, published_layout
from kvdata.client.http import Http
from kvdata.errors import (
    GeometryMismatch,
    InvalidRequest,
    ProtocolError,
    ServerTimeout,
    UnsupportedLayout,
    UnsupportedServer,
)


def entry(fmt="NL_X_TWO_NB_BS_NH_HS", shape="30 x [2, 100, 128, 3, 64]", groups=1, world_size=1, **group):
    one = {
        "object_group_idx": 0,
        "dtype": "torch.bfloat16",
        "engine_kv_format": fmt,
        "engine_kv_concrete_shape": shape,
        "is_mla": False,
        **group,
    }
    layout = {"num_layers": 30, "cache_size_per_token": 23040, "kernel_groups": [one] * groups}
    return {"model_name": "m", "world_size": world_size, "kv_cache_layout": layout}


def connection(**options) -> Connection:
    return Connection("tcp://h:1", "http://h:2", "m", **options)


SPLIT = KVLayout(30, 3, 64)


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        ("NB_NL_TWO_BS_NH_HS", "[100, 30, 2, 128, 3, 64]"),
        ("NL_X_TWO_NB_BS_NH_HS", "30 x [2, 100, 128, 3, 64]"),
        ("NL_X_NB_TWO_BS_NH_HS", "30 x [100, 2, 128, 3, 64]"),
        ("TWO_X_NL_X_NBBS_NH_HS", "2 x 30 x [12800, 3, 64]"),
        ("NL_X_TWO_NB_NH_BS_HS", "30 x [2, 100, 3, 128, 64]"),
        ("NL_X_NB_TWO_NH_BS_HS", "30 x [100, 2, 3, 128, 64]"),
        ("NB_NL_TWO_NH_BS_HS", "[100, 30, 2, 3, 128, 64]"),
        ("TWO_X_NL_X_NB_BS_NH_HS", "2 x 30 x [100, 128, 3, 64]"),
        ("NL_X_TWO_NB_NH_ONE_BS_HS", "30 x [2, 100, 3, 1, 128, 64]"),
        ("EngineKVFormat.NL_X_TWO_X_NB_BS_NH_HS", "30 x 2 x [100, 128, 3, 64]"),
    ],
)
def test_every_split_format_gives_its_heads(fmt, shape):
    assert published_layout(entry(fmt, shape), connection()) == SPLIT


FUSED = entry("NL_X_NB_NH_BS_CS", "Unknown (EngineKVFormat.NL_X_NB_NH_BS_CS)")
CONFIG = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}


def test_a_fused_layout_is_never_guessed():
    with pytest.raises(UnsupportedLayout, match='packing="fused" for'):
        published_layout(FUSED, connection(model_config=CONFIG))
    with pytest.raises(UnsupportedLayout, match="model_config="):
        published_layout(FUSED, connection(packing="fused"))


def test_a_fused_layout_takes_heads_from_config_or_layout(tmp_path):
    fused = SPLIT.with_packing("fused")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    for options in (
        {"packing": "fused", "model_config": CONFIG},
        {"packing": "fused", "model_config": path},
        {"layout": fused},
    ):
        assert published_layout(FUSED, connection(**options)) == fused
    wrong = {**CONFIG, "num_key_value_heads": 9}
    with pytest.raises(GeometryMismatch, match="bytes a token"):
        published_layout(FUSED, connection(packing="fused", model_config=wrong))


@pytest.mark.parametrize(
    ("published", "match"),
    [
        (entry(is_mla=True, fmt="NL_X_NB_BS_HS"), "uses MLA"),
        (entry(groups=2), "hybrid model"),
        (entry(object_group_idx=1), "hybrid model"),
        (entry(fmt="NL_X_NB_BSV_BSS"), "cannot be read"),
        (entry(shape="Unknown"), "heads cannot be read"),
        (entry(dtype="torch.float8_e4m3fn"), "not supported"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(published, match):
    with pytest.raises(UnsupportedLayout, match=match) as caught:
        published_layout(published, connection())
    assert "\n" not in str(caught.value)


def test_a_layout_that_contradicts_the_engine_is_refused():
    with pytest.raises(GeometryMismatch, match="but the engine registered"):
        published_layout(entry(), connection(layout=KVLayout(30, 6, 32)))
    with pytest.raises(GeometryMismatch, match="bytes a token"):
        published_layout(entry(shape="30 x [2, 100, 128, 4, 64]"), connection())
    with pytest.raises(ProtocolError, match="unknown way"):
        published_layout({"model_name": "m"}, connection())


def test_workers_publish_their_share_of_the_heads():
    shared = entry(world_size=2)
    assert published_layout(shared, connection()) == KVLayout(30, 6, 64)
    assert published_layout(shared, connection(layout=KVLayout(30, 6, 64), world_size=2)) == KVLayout(30, 6, 64)
    with pytest.raises(GeometryMismatch, match="2 workers"):
        published_layout(shared, connection(world_size=4))
    fused = {**FUSED, "world_size": 3}
    config = {**CONFIG, "num_key_value_heads": 9}
    assert published_layout(fused, connection(packing="fused", model_config=config)).num_kv_heads == 9
    with pytest.raises(ProtocolError, match="world size"):
        published_layout({**shared, "world_size": "two"}, connection())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("localhost:1", "http://h", "m"), "ZMQ URL"),
        (("tcp://h:1", "h:8080", "m"), "http_url"),
        (("tcp://h:1", "http://h", ""), "model_name"),
        (("tcp://h:1", "http://h", "a@b"), "model_name"),
        (("tcp://h:1", "http://h", "m", 0), "timeout"),
        (("tcp://h:1", "http://h", "m", 1, None, "zigzag"), "packing"),
    ],
)
def test_a_connection_checks_its_arguments(arguments, match):
    with pytest.raises(InvalidRequest, match=match):
        Connection(*arguments)


@pytest.mark.parametrize(
    ("answers", "error", "match"),
    [
        ({"/lmc_version": "0.4.6"}, UnsupportedServer, "needs 0.4.7 or newer"),
        ({"/config": {"mp": {"chunk_size": 64, "transport": "grpc"}}}, UnsupportedServer, "--transport zmq"),
        (
            {"/config": {"mp": {"chunk_size": 64, "supported_transfer_mode": "lmcache_driven"}}},
            UnsupportedServer,
            "--supported-transfer-mode auto",
        ),
        ({"/config": {}}, ProtocolError, "is this an LMCache"),
        ({"/lmc_version": {"detail": "what?"}}, ProtocolError, "is this an LMCache server"),
        ({"/lmc_version": None}, ProtocolError, "answered 404"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_apart(answers, error, match):
    config = {"mp": {"chunk_size": 64, "transport": "zmq", "supported_transfer_mode": "auto"}}
    found = {"/lmc_version": "0.5.6", "/config": config, "/status": {}, **answers}

    def answer(request: httpx.Request) -> httpx.Response:
        body = found.get(request.url.path)
        return httpx.Response(404) if body is None else httpx.Response(200, json=body)

    http = Http("http://h", 1)
    http._client = httpx.Client(base_url="http://h", transport=httpx.MockTransport(answer))
    with pytest.raises(error, match=match):
        discover(http)


def test_html_and_silence_are_not_servers():
    http = Http("http://h", 1)
    http._client = httpx.Client(
        base_url="http://h", transport=httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    )
    with pytest.raises(ProtocolError, match="did not answer JSON"):
        discover(http)

    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("read timed out", request=request)

    http._client = httpx.Client(base_url="http://h", transport=httpx.MockTransport(silent))
    with pytest.raises(ServerTimeout, match="GET http://h/lmc_version"):
        discover(http)


def test_older_servers_spell_the_configuration_differently():
    found = {"/lmc_version": "0.5.0", "/conf": {"mp": {"chunk_size": 16}}, "/status": {}}

    def answer(request: httpx.Request) -> httpx.Response:
        body = found.get(request.url.path)
        return httpx.Response(404) if body is None else httpx.Response(200, json=body)

    http = Http("http://h", 1)
    http._client = httpx.Client(base_url="http://h", transport=httpx.MockTransport(answer))
    info = discover(http)
    assert (info.release, info.chunk_size, info.grace_seconds) == ((0, 5, 0), 16, 3600.0)
