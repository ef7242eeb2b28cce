"""HTTP face of the embedded server: version, configuration, status, metrics, clear, delete by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvdata.layout import KVLayout
from kvdata.server.service import Service

VERSION = "0.5.6"  # the release whose protocol this server speaks
BODY_BYTES = 64 << 20  # of a request; 300,000 keys


class ObjectName(msgspec.Struct):
    """One stored object."""

    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


class Removal(msgspec.Struct):
    """Body of ``POST /cache/clear`` (no keys, tier l1) and of ``DELETE /cache/objects``."""

    keys: list[ObjectName] = []
    tier: Literal["l1", "l2", "all"] | None = None
    force: bool = False


def build_app(service: Service, config: dict[str, Any], is_alive: Callable[[], bool]) -> Starlette:
    """The ASGI application. ``config`` answers ``/config``; ``is_alive`` tells whether ZMQ is served."""

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "healthy"}) if is_alive() else JSONResponse({"status": "dead"}, 503)

    async def clear(request: Request) -> Response:
        body = await _removal(request)
        if body.tier not in ("l1", None):
            raise HTTPException(400, f"tier {body.tier!r} not supported; only 'l1'")
        with service.lock:
            service.clear(body.force)
        return JSONResponse({"status": "ok", "cleared": {"tier": "l1"}})

    async def delete(request: Request) -> Response:
        body = await _removal(request)
        if body.tier != "l1":
            raise HTTPException(503, "no L2 adapters configured")
        named = [k for k in body.keys if k.object_group_id == 0]
        try:
            keys = [(bytes.fromhex(k.chunk_hash_hex), k.model_name, k.kv_rank, k.cache_salt) for k in named]
        except ValueError as exc:
            raise HTTPException(400, f"chunk_hash_hex: {exc}") from exc
        with service.lock:
            deleted, skipped = service.store.delete(keys, body.force)
        return JSONResponse({"deleted": deleted, "skipped": skipped, "ok": True})

    async def detail(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        return JSONResponse({"detail": exc.detail}, exc.status_code)

    routes = [
        Route("/healthcheck", health),
        Route("/lmc_version", _get(lambda: JSONResponse(VERSION))),
        Route("/config", _get(lambda: JSONResponse(config))),
        Route("/status", _get(lambda: JSONResponse(_status(service)))),
        Route("/metrics", _get(lambda: PlainTextResponse(_metrics(service)))),
        Route("/cache/clear", clear, methods=["POST"]),
        Route("/cache/objects", delete, methods=["DELETE"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: detail})


def _get(answer: Callable[[], Response]) -> Callable[[Request], Any]:
    async def endpoint(_: Request) -> Response:
        return answer()

    return endpoint


async def _removal(request: Request) -> Removal:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES:
            raise HTTPException(413, f"more than {BODY_BYTES} bytes; name fewer keys at a time")
    try:
        return msgspec.json.decode(body or b"{}", type=Removal)
    except (msgspec.MsgspecError, RecursionError) as exc:  # the latter for what is nested a thousand deep
        raise HTTPException(422, str(exc)) from exc


def _status(service: Service) -> dict[str, Any]:
    with service.lock:
        registered = {i: instance.registration for i, instance in service.instances.items()}
        contexts = {
            str(i): {f: getattr(r, f) for f in ("model_name", "world_size", "block_size", "use_mla")}
            for i, r in registered.items()
        }
        return {
            "engine_type": "kvdata",
            "chunk_size": service.chunk_size,
            "hash_algorithm": "blake3",
            "active_sessions": len(service.sessions),
            "storage_manager": {"l1_manager": service.store.status(), "num_l2_adapters": 0},
            "worker_liveness": {
                "enabled": True,
                "reap_timeout_seconds": service.reap_seconds,
                "registration_grace_seconds": service.grace_seconds,
                "tracked_instances": len(registered),
            },
            "registered_gpu_ids": [],
            "cache_context_meta": {
                name: _like_an_engine(name, layout, service.chunk_size)
                for name, layout in service.layouts.items()
                if not layout.fused  # LMCache's own SDK cannot read what it publishes of a fused cache
            },
            "registered_non_cuda_instance_ids": list(registered),
            "non_cuda_context_meta": contexts,
            "kvdata_layouts": {name: layout.to_dict() for name, layout in service.layouts.items()},
        }


def _like_an_engine(name: str, layout: KVLayout, chunk_size: int) -> dict[str, Any]:
    """A remembered layout as an engine's entry: LMCache's own SDK takes a model's geometry from nowhere else.

    ``published_by`` tells kvdata's client that no engine stands behind it.
    """
    shape = [1, 2, layout.num_kv_heads, chunk_size, layout.head_dim]  # one block, of a chunk's size
    group = {
        "tokens_per_block": chunk_size,
        "dtype": str(layout.dtype),
        "engine_kv_format": "NL_X_NB_TWO_NH_BS_HS",
        "engine_kv_concrete_shape": f"{layout.num_layers} x {shape}",
    }
    published = {"num_layers": layout.num_layers, "kernel_groups": [group]}
    return {"model_name": name, "world_size": 1, "published_by": "kvdata", "kv_cache_layout": published}


def _metrics(service: Service) -> str:
    store = service.store
    with service.lock:
        families = {"write": store.written, "read": store.read, "evicted": store.evicted}
        return "".join(_family(f"lmcache_mp_l1_{name}_chunks_total", n) for name, n in families.items())


def _family(metric: str, counts: Counter[str]) -> str:
    """Prometheus text. Like the real exporter's: nothing before the first count, no ``cache_salt`` before the
    first salt."""
    text = f"# TYPE {metric} counter\n" if counts else ""
    for salt, count in counts.items():
        escaped = salt.replace("\n", "\\n").replace('"', '\\"')  # a backslash cannot occur in a salt
        label = f'cache_salt="{escaped}",' if any(counts) else ""
        text += f'{metric}{{{label}l1_tag="_default"}} {float(count)}\n'
    return text
