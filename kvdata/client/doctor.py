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
from kvdata.client.discovery import Http, discover
from kvdata.client.rpc import Deadline, Rpc
from kvdata.errors import KVCacheSDKError, ServerTimeout

_ROUND_TRIP_BYTES = 64 << 20


@dataclass(frozen=True)
class Check:
    """One step: its name, whether it went well, and what was found or what to do."""

    name: str
    ok: bool
    detail: str


def diagnose(connection: Connection) -> Iterator[Check]:
    """Check HTTP, release and mode, ZMQ, models, layout, transfer and a round trip; ends at the first failure.

    The round trip stores random KV under a salt of its own, reads it back and deletes it.
    """
    http = Http(connection.http_url, min(connection.timeout, 10))
    step = "HTTP"
    try:
        version = http.json("GET", "/lmc_version")
        yield Check(step, True, f"{connection.http_url} answers, release {version}")
        step = "mode"
        info = discover(http)
        yield Check(step, True, f"engine-driven operations are served, chunks of {info.chunk_size} tokens")
        step = "ZMQ"
        yield Check(step, True, _noop(connection, info.release))
        step = "model"
        with connection.connect() as ctx:
            served = connection.model_name in info.engines
            names = ", ".join(info.model_names()) or "none"
            by = "by an engine" if served else "by no engine: its layout was given or remembered"
            yield Check(step, True, f"{connection.model_name} is registered {by} (registered: {names})")
            layout = ctx.layout
            shape = f"[2, {layout.num_layers}, T, {layout.num_kv_heads} x {layout.head_dim}]"
            yield Check(
                "layout", True, f"{shape} {layout.dtype}, packing {layout.packing}, {layout.token_bytes} B/token"
            )
            yield Check("transfer", True, ctx.transfer)
            step = "round trip"
            yield Check(step, True, _round_trip(ctx))
    except KVCacheSDKError as exc:
        yield Check(step, False, f"{type(exc).__name__}: {exc}")
    finally:
        http.close()


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
