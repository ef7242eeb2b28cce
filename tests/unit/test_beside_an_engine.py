"""A serving engine has the model registered: its layout is used, its registration left alone, its end survived.

The engine is a stand-in: a registration of the model's real name by a raw client, published in ``/status`` as
LMCache publishes an engine's. The real engine is the live suite's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

import kvdata.server.web
from kvdata import Connection, KVCacheContext, KVLayout
from kvdata.client.deadline import Deadline
from kvdata.client.rpc import Rpc
from kvdata.client.verify import verify
from kvdata.errors import GeometryMismatch, MissingKV, ModelNotRegistered, UnsupportedLayout
from kvdata.server import EmbeddedServer
from kvdata.wire.messages import Registration
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv

ENGINE_ID = 4711


class Engine:
    """Registers ``model`` and shows up in the status of ``server`` until it is stopped."""

    def __init__(self, server: EmbeddedServer, model: str, patch: pytest.MonkeyPatch, **group: Any) -> None:
        self._rpc = Rpc(server.url)
        self.published: dict[str, Any] = {
            "model_name": model,
            "world_size": 1,
            "kv_cache_layout": {
                "num_layers": LAYOUT.num_layers,
                "cache_size_per_token": LAYOUT.token_bytes,
                "kernel_groups": [
                    {
                        "object_group_idx": 0,
                        "dtype": "torch.bfloat16",
                        "engine_kv_format": "NL_X_TWO_NB_BS_NH_HS",
                        "engine_kv_concrete_shape": "3 x [2, 10, 16, 2, 8]",
                        "is_mla": False,
                        **group,
                    }
                ],
            },
        }
        registration = Registration(ENGINE_ID, model, 1, 32, 3, LAYOUT.hidden, "bfloat16", False, 32)
        self._rpc.call("register", registration, result=dict, deadline=Deadline(30))
        self.running = True
        plain = kvdata.server.web._status

        def status(service: Any) -> dict[str, Any]:
            found = plain(service)
            if self.running:
                found["cache_context_meta"] = {str(ENGINE_ID): self.published}
            # LMCache lists an engine there, and not among the engine-driven clients
            found["non_cuda_context_meta"].pop(str(ENGINE_ID), None)
            found["kvdata_layouts"] = {}
            return found

        patch.setattr(kvdata.server.web, "_status", status)

    def stop(self) -> None:
        if self.running:
            self.running = False
            self._rpc.call("unregister", ENGINE_ID, result=type(None), deadline=Deadline(30))
            self._rpc.close()


@pytest.fixture
def engine(embedded: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    engine = Engine(embedded, "served/model", monkeypatch)
    yield engine
    engine.stop()


def connect(server: EmbeddedServer, **options: Any) -> KVCacheContext:
    return Connection(server.url, server.http_url, "served/model", 30, **options).connect()


def test_the_published_layout_is_enough_and_the_name_registered_is_private(embedded, engine):
    tokens, kv = fresh_tokens(64), random_kv(64)
    with connect(embedded) as ctx:
        assert ctx.layout == LAYOUT
        assert [name.split("/")[0] for name in clients(embedded)] == ["kvdata"]
        assert ctx.store(kv, tokens) is True
        assert torch.equal(ctx.retrieve(tokens), kv)
        assert ctx.retrieve(fresh_tokens(64)) is None  # a miss, while the engine runs
        assert ctx.stats()["handshakes"] == 1


def test_fill_stop_the_engine_train(embedded, engine):
    """When the engine has gone the server answers every lookup with 0, though the objects are all there."""
    tokens, kv = fresh_tokens(64), random_kv(64)
    ctx = connect(embedded)
    ctx.store(kv, tokens)
    engine.stop()
    assert torch.equal(ctx.retrieve(tokens), kv)  # registered anew under the real name, from the known layout
    assert ctx.stats()["misses"] == 0
    assert clients(embedded) == ["served/model"]  # the private registration is gone
    later = connect(embedded, layout=LAYOUT)
    ctx.close()
    assert torch.equal(later.retrieve(tokens), kv)
    later.close()
    with pytest.raises(ModelNotRegistered, match="served/model"):
        connect(embedded)


def test_an_engine_that_comes_back_keeps_its_own_layout(embedded, engine, monkeypatch):
    """A server has one layout for a name, the last that was registered: a client that was idle must not renew its."""
    tokens, kv = fresh_tokens(64), random_kv(64)
    with connect(embedded) as ctx:
        ctx.store(kv, tokens)
        engine.stop()
        assert torch.equal(ctx.retrieve(tokens), kv)
        assert clients(embedded) == ["served/model"]
        back = Engine(embedded, "served/model", monkeypatch)
        ctx._sessions._used -= 3600  # as if it had been idle for an hour
        assert torch.equal(ctx.retrieve(tokens), kv)
        assert [name.split("/")[0] for name in clients(embedded)] == ["kvdata"]
    back.stop()


def test_a_layout_that_contradicts_the_engines_is_refused(embedded, engine):
    with pytest.raises(GeometryMismatch, match="but the engine registered"):
        connect(embedded, layout=KVLayout(3, 4, 4))


@pytest.mark.parametrize(
    ("group", "match"),
    [
        ({"is_mla": True, "engine_kv_format": "NL_X_NB_BS_HS"}, "MLA"),
        ({"object_group_idx": 1}, "hybrid"),
        ({"engine_kv_format": "NL_X_NB_NH_BS_CS"}, 'packing="fused" for'),
    ],
)
def test_what_cannot_be_read_leaves_no_lock_and_no_registration(embedded, monkeypatch, group, match):
    engine = Engine(embedded, "served/model", monkeypatch, **group)
    with pytest.raises(UnsupportedLayout, match=match):
        connect(embedded)
    engine.stop()
    assert clients(embedded) == []


def test_a_fused_cache_is_read_once_its_packing_is_said(embedded, monkeypatch):
    engine = Engine(
        embedded,
        "served/model",
        monkeypatch,
        engine_kv_format="NL_X_NB_BS_NH_CS",
        engine_kv_concrete_shape="Unknown (EngineKVFormat.NL_X_NB_BS_NH_CS)",
    )
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    tokens, kv = fresh_tokens(64), random_kv(64)
    with connect(embedded, packing="fused", model_config=config) as ctx:
        assert ctx.layout == LAYOUT.with_packing("fused")
        ctx.store(kv, tokens)
        assert torch.equal(ctx.retrieve(tokens), kv)
    engine.stop()


def clients(server: EmbeddedServer) -> list[str]:
    """Names under which clients (not the engine) are registered."""
    status = httpx.get(server.http_url + "/status", trust_env=False).json()
    return [entry["model_name"] for entry in status["non_cuda_context_meta"].values()]


class Computes:
    """A model whose cache is known."""

    layout = LAYOUT

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv

    def prefill(self, tokens: list[int]) -> torch.Tensor:
        return self.kv[:, :, : len(tokens)]


@pytest.fixture
def fused_engine(embedded, monkeypatch, tmp_path) -> Iterator[Engine]:
    monkeypatch.setenv("KVDATA_CACHE", str(tmp_path))
    engine = Engine(
        embedded,
        "served/model",
        monkeypatch,
        engine_kv_format="NL_X_NB_NH_BS_CS",
        engine_kv_concrete_shape="Unknown (EngineKVFormat.NL_X_NB_NH_BS_CS)",
        tokens_per_block=32,
    )
    yield engine
    engine.stop()


@pytest.mark.parametrize("packing", ["fused", "vllm-cpu"])
def test_verify_finds_the_packing_and_auto_takes_it_from_then_on(embedded, fused_engine, packing):
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    tokens, kv = fresh_tokens(64), random_kv(64)
    with pytest.raises(UnsupportedLayout, match="kvdata verify"):
        connect(embedded, model_config=config)
    with connect(embedded, packing=packing, model_config=config) as ctx:
        ctx.store(kv, tokens)
        noisy = (kv.float() * (1 + 0.01 * torch.randn(kv.shape))).to(kv.dtype)
        found = ctx.verify(Computes(noisy), tokens)
    assert found.packing == packing
    assert found.tokens == 64
    assert set(found.errors) == {"fused", "vllm-cpu"}
    assert max(found.errors[packing]) < 0.02
    wrong = next(errors for name, errors in found.errors.items() if name != packing)
    assert min(wrong) > 0.5
    assert f"packing {packing} fits (64 tokens" in str(found)
    with connect(embedded, model_config=config) as ctx:  # auto
        assert ctx.layout.packing == packing
        assert torch.equal(ctx.retrieve(tokens), kv)


def test_verify_says_when_nothing_fits_and_forgets_what_it_knew(embedded, fused_engine):
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    tokens, kv = fresh_tokens(64), random_kv(64)
    with connect(embedded, packing="fused", model_config=config) as ctx:
        ctx.store(kv, tokens)
        assert ctx.verify(Computes(kv), tokens).packing == "fused"
        found = ctx.verify(Computes(random_kv(64)), tokens)
        assert found.packing is None
        assert str(found).startswith("no known packing fits")
        with pytest.raises(MissingKV, match="choose others"):
            ctx.verify(Computes(kv), fresh_tokens(64))
    with pytest.raises(UnsupportedLayout, match="differently"):
        connect(embedded, model_config=config)


def test_a_model_of_another_geometry_is_told_apart(embedded, fused_engine):
    tokens = fresh_tokens(64)
    model = Computes(random_kv(64))
    model.layout = KVLayout(3, 2, 16)
    with pytest.raises(UnsupportedLayout, match="cannot be compared"):
        verify(Connection(embedded.url, embedded.http_url, "served/model", 5), model, tokens)
