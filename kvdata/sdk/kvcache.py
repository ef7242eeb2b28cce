"""``connect``, ``retrieve``, ``store``, ``close``: a thin surface over `KVCacheContext`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvdata.client.connection import Connection
from kvdata.client.context import KVCacheContext
from kvdata.layout import KVLayout
from kvdata.wire.keys import Tokens

LMCacheKVCacheContext = KVCacheContext


def connect(
    url: str,
    http_url: str,
    model_name: str,
    timeout: float = 60.0,
    *,
    layout: KVLayout | None = None,
    packing: str = "auto",
    model_config: Mapping[str, Any] | str | Path | None = None,
) -> KVCacheContext:
    """Connect to a running server and register; arguments as in `Connection`.

    Raises `ServerUnreachable`, `ModelNotRegistered`, `UnsupportedServer`, `UnsupportedLayout` or
    `PoolNotMappable`, each saying what to do.
    """
    return Connection(url, http_url, model_name, timeout, layout, packing, model_config).connect()


def retrieve(ctx: KVCacheContext, tokens: Tokens, cache_salt: str = "") -> torch.Tensor | None:
    """KV of the cached prefix of ``tokens``: contiguous CPU ``[2, L, hit, D]``, or None on a miss."""
    return ctx.retrieve(tokens, cache_salt)


def store(ctx: KVCacheContext, kv: torch.Tensor, tokens: Tokens, cache_salt: str = "") -> bool:
    """Store ``[2, L, T, D]`` under ``T`` token ids; False when all of it was there already."""
    return ctx.store(kv, tokens, cache_salt)


def close(ctx: KVCacheContext) -> None:
    """Un-register and disconnect."""
    ctx.close()
