"""`Connection`: says where a server is and which model's cache is meant. Plain data, safe to pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvdata.errors import InvalidRequest
from kvdata.layout import PACKINGS, KVLayout
from kvdata.wire.keys import check_model_name

if TYPE_CHECKING:
    from kvdata.client.context import KVCacheContext


@dataclass(frozen=True)
class Connection:
    """Where a server is and which model's cache is meant.

    Args:
        url: ZMQ URL of the server, e.g. ``tcp://localhost:5555``.
        http_url: its HTTP URL, e.g. ``http://localhost:8080``.
        model_name: the name under which the engine registered the model (the path or id given to vLLM).
        timeout: seconds within which any single operation must end.
        layout: geometry of the cache, for a model that no engine has registered.
        packing: byte order of a fused cache; ``"auto"`` takes what is known and never guesses.
        model_config: the model's ``config.json`` as a dict or a path: heads and head size of a fused cache.
        world_size: tensor-parallel workers that share the cache by heads; None takes what the engine registered, and 1
            where there is none. Layouts and tensors are those of the whole model.
        prefault: touch the server's whole shared-memory pool when connecting (about 1 s for 10 GB), so that the first
            pass over it is as fast as the next ones. Pool memory that nobody has used yet is taken by it.
    """

    url: str
    http_url: str
    model_name: str
    timeout: float = 60.0
    layout: KVLayout | None = None
    packing: str = "auto"
    model_config: Mapping[str, Any] | str | Path | None = None
    world_size: int | None = None
    prefault: bool = False

    def __post_init__(self) -> None:
        check_model_name(self.model_name)
        if urlsplit(self.url).scheme not in ("tcp", "ipc"):
            raise InvalidRequest(f"url must be a ZMQ URL such as tcp://localhost:5555, got {self.url!r}")
        if urlsplit(self.http_url).scheme not in ("http", "https"):
            raise InvalidRequest(f"http_url must start with http:// or https://, got {self.http_url!r}")
        if not self.timeout > 0:
            raise InvalidRequest(f"timeout must be a positive number of seconds, got {self.timeout!r}")
        if self.world_size is not None and not 1 <= self.world_size <= 255:
            raise InvalidRequest(f"world_size must be 1 .. 255, got {self.world_size!r}")
        if self.packing not in ("auto", *PACKINGS):
            raise InvalidRequest(f"unknown packing {self.packing!r}; known: auto, {', '.join(PACKINGS)}")

    def connect(self) -> KVCacheContext:
        """Open a context and shake hands with the server; use it with ``with`` or close it."""
        from kvdata.client.context import KVCacheContext

        context = KVCacheContext(self)
        try:
            context.open()
        except BaseException:
            context.close()
            raise
        return context

    def heads(self) -> tuple[int, int] | None:
        """``(num_kv_heads, head_dim)`` from ``layout`` or ``model_config``; None when neither is given."""
        if self.layout is not None:
            return self.layout.num_kv_heads, self.layout.head_dim
        if self.model_config is None:
            return None
        config = self.model_config
        if not isinstance(config, Mapping):
            try:
                config = json.loads(Path(config).read_text())
            except (OSError, ValueError) as exc:
                raise InvalidRequest(f"model_config {config} cannot be read: {exc}") from exc
        config = config.get("text_config") or config
        try:
            query_heads = config["num_attention_heads"]
            head_dim = config.get("head_dim") or config["hidden_size"] // query_heads
        except KeyError as exc:
            raise InvalidRequest(f"model_config lacks {exc.args[0]!r}") from exc
        return config.get("num_key_value_heads") or query_heads, head_dim
