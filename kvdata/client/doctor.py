"""Walks a connection step by step and says, for the first thing that is wrong, what mends it."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvdata.client.connection import Connection
from kvdata.client.context import KVCacheContext
from kvdata.client.deadline import Deadline
from kvdata.client.discovery import ServerInfo, discover, read_release
from kvdata.client.http import Http
from kvdata.client.packings import recall_packing
from kvdata.client.rpc import Rpc
from kvdata.errors import (
    GeometryMismatch,
    KVCacheSDKError,
    ModelNotRegistered,
    PoolNotMappable,
    ServerTimeout,
    UnknownPacking,
    UnsupportedLayout,
)
from kvdata.layout import dtype_name

_ROUND_TRIP_BYTES = 64 << 20


@dataclass(frozen=True)
class Check:
    """One step: its name, whether it went well, and what was found or what to do."""

    name: str
    ok: bool
    detail: str


def diagnose(connection: Connection) -> Iterator[Check]:
    """Check HTTP, release, mode, ZMQ, model, layout, packing, memory and a round trip; ends at the first failure.

    The round trip stores random KV under a salt of its own, reads it back and deletes it.
    """
    http = Http(connection.http_url, min(connection.timeout, 10))
    step = "HTTP"
    try:
        # Not only reachable: another HTTP server at this port has no such page.
        http.json("GET", "/lmc_version")
        yield Check(step, True, f"{connection.http_url} answers")
        step = "version"
        release = read_release(http)
        yield Check(step, True, f"LMCache {'.'.join(map(str, release))}, or a server that mimics it")
        step = "mode"
        info = discover(http)
        yield Check(step, True, f"engine-driven operations are served, chunks of {info.chunk_size} tokens")
        step = "ZMQ"
        yield Check(step, True, _noop(connection, release))
        step = "connection"
        with connection.connect() as ctx:
            yield from _found(connection, info, ctx)
            step = "round trip"
            yield Check(step, True, _round_trip(ctx))
    except KVCacheSDKError as exc:
        failed = _step_of(exc) if step == "connection" else step
        if failed in ("layout", "packing", "memory"):
            yield _model(connection, info)
        yield Check(failed, False, f"{type(exc).__name__}: {exc}")
    finally:
        http.close()


def _found(connection: Connection, info: ServerInfo, ctx: KVCacheContext) -> Iterator[Check]:
    layout = ctx.layout
    shape = f"[2, {layout.num_layers}, T, {layout.num_kv_heads} x {layout.head_dim}] {dtype_name(layout.dtype)}"
    yield _model(connection, info)
    yield Check("layout", True, f"{shape}, {layout.token_bytes} B/token")
    verified = " (by kvdata verify)" if layout.packing == recall_packing(connection) else ""
    yield Check("packing", True, f"{layout.packing}{verified}")
    yield Check("memory", True, ctx.transfer)


def _model(connection: Connection, info: ServerInfo) -> Check:
    by = "by an engine" if connection.model_name in info.engines else "by no engine: its layout was given or remembered"
    names = ", ".join(info.model_names()) or "none"
    return Check("model", True, f"{connection.model_name} is registered {by} (registered: {names})")


def _step_of(exc: KVCacheSDKError) -> str:
    """Which part of connecting an error is about."""
    steps: tuple[tuple[type[KVCacheSDKError], str], ...] = (
        (ModelNotRegistered, "model"),
        (UnknownPacking, "packing"),
        (UnsupportedLayout, "layout"),
        (GeometryMismatch, "layout"),
        (PoolNotMappable, "memory"),
    )
    return next((step for kind, step in steps if isinstance(exc, kind)), "connection")


def _noop(connection: Connection, release: tuple[int, int, int]) -> str:
    rpc = Rpc(connection.url, release)
    try:
        started = time.perf_counter()
        # The HTTP health check says nothing of this thread, which can die alone.
        rpc.call("noop", result=object, deadline=Deadline(min(connection.timeout, 10)))
        return f"{connection.url} answers in {1e3 * (time.perf_counter() - started):.1f} ms"
    except ServerTimeout as exc:
        raise ServerTimeout(f"{exc}. HTTP answers, so the process lives: restart the server") from exc
    finally:
        rpc.close()


def _round_trip(ctx: KVCacheContext) -> str:
    layout, chunk = ctx.layout, ctx.chunk_size
    chunks = max(1, min(16, _ROUND_TRIP_BYTES // (chunk * layout.token_bytes)))
    shape = (2, layout.num_layers, chunks * chunk, layout.hidden)
    kv = torch.randn(shape, dtype=torch.float32).to(layout.dtype)
    tokens, salt = [secrets.randbits(31)] * shape[2], f"kvdata-doctor-{uuid.uuid4().hex}"
    gigabytes = kv.numel() * kv.element_size() / 1e9
    try:
        started = time.perf_counter()
        ctx.store(kv, tokens, salt)
        stored = time.perf_counter()
        found = ctx.retrieve(tokens, salt)
        read = time.perf_counter()
    finally:
        ctx.delete(tokens, salt)
    if found is None or not torch.equal(found, kv):
        raise KVCacheSDKError("what was read back is not what was stored; please report this")
    return (
        f"{gigabytes:.2f} GB stored at {gigabytes / (stored - started):.1f} GB/s, read back equal at "
        f"{gigabytes / (read - stored):.1f} GB/s"
    )
