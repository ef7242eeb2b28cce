"""What the server says of itself over HTTP: release, configuration, registered models and their geometry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdata.client.connection import Connection
from kvdata.client.deadline import Deadline
from kvdata.client.http import Http
from kvdata.client.packings import recall_packing
from kvdata.errors import (
    GeometryMismatch,
    InvalidRequest,
    ProtocolError,
    UnknownPacking,
    UnsupportedLayout,
    UnsupportedServer,
)
from kvdata.layout import KVLayout, parse_dtype
from kvdata.wire.messages import KV_EVENTS, OLDEST, Release, parse_release

# Split formats: where heads and head size stand in the last bracket of the published shape.
_SPLIT_FORMATS: dict[str, tuple[int, int]] = {
    "NB_NL_TWO_BS_NH_HS": (4, 5),
    "NL_X_TWO_NB_BS_NH_HS": (3, 4),
    "NL_X_NB_TWO_BS_NH_HS": (3, 4),
    "TWO_X_NL_X_NBBS_NH_HS": (1, 2),
    "NL_X_TWO_NB_NH_BS_HS": (2, 4),
    "NL_X_NB_TWO_NH_BS_HS": (2, 4),
    "NB_NL_TWO_NH_BS_HS": (3, 5),
    "TWO_X_NL_X_NB_BS_NH_HS": (2, 3),
    "NL_X_TWO_NB_NH_ONE_BS_HS": (2, 5),
    "NL_X_TWO_X_NB_BS_NH_HS": (2, 3),
}
_LARGEST_CHUNK = 1 << 20  # tokens
_FUSED_FORMATS = ("NL_X_NB_NH_BS_TWO_HS", "NL_X_NB_BS_NH_TWO_HS", "NL_X_NB_NH_BS_CS", "NL_X_NB_BS_NH_CS")


@dataclass(frozen=True)
class ServerInfo:
    """One reading of a server's configuration and status.

    Attributes:
        release: e.g. ``(0, 5, 6)``.
        chunk_size: tokens in a chunk.
        grace_seconds: how long a silent registration lives.
        write_ttl_seconds: how long a reservation is kept for its writer.
        read_ttl_seconds: how long a reader's locks are kept.
        engines: published layout (raw) of each model that a serving engine registered.
        clients: model name of each engine-driven instance, by instance id.
        layouts: geometry the embedded server remembers, by model name.
        incarnation: what the server calls this run of its, if it says so.
        memory_only: everything is in its own memory, and nothing in a second tier.
    """

    release: Release
    chunk_size: int
    grace_seconds: float
    write_ttl_seconds: float
    read_ttl_seconds: float
    engines: Mapping[str, Mapping[str, Any]]
    clients: Mapping[int, str]
    layouts: Mapping[str, KVLayout]
    memory_only: bool
    incarnation: str | None = None

    def model_names(self) -> list[str]:
        """All public model names that the server knows."""
        names = {*self.engines, *self.clients.values(), *self.layouts}
        return sorted(name for name in names if not name.startswith("kvdata/"))


def discover(http: Http, deadline: Deadline | None = None) -> ServerInfo:
    """Read version, configuration and status; `UnsupportedServer` when this client cannot talk to it.

    Raises `ProtocolError` for answers that no server gives.
    """
    release = read_release(http, deadline)
    config = http.json("GET", "/config", "/conf", deadline=deadline)
    status = http.json("GET", "/status", deadline=deadline)
    try:
        settings = config["mp"]
        chunk_size = int(settings["chunk_size"])
        if not 1 <= chunk_size <= _LARGEST_CHUNK:
            raise ValueError(f"a sensible chunk size: {chunk_size}")
    except (KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(f"{http.url}/config lacks {exc}; is this an LMCache multiprocess server?") from exc
    _check_mode(settings, http.url)
    try:
        return ServerInfo(
            release=release,
            chunk_size=chunk_size,
            grace_seconds=float(settings.get("worker_registration_grace_seconds") or 3600.0),
            write_ttl_seconds=_ttl(status, "write", 600.0),
            read_ttl_seconds=_ttl(status, "read", 300.0),
            engines=_engines(status),
            clients=registered_clients(status),
            layouts=_remembered_layouts(status),
            memory_only=_second_tiers(status) == 0,
            incarnation=None if (run := settings.get("instance_id")) is None else str(run),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(
            f"{http.url} describes itself in an unknown way: {exc!r}; is this an LMCache server?"
        ) from exc


def _ttl(status: Any, lock: str, otherwise: float) -> float:
    manager = status.get("storage_manager") if isinstance(status, dict) else None
    found = manager.get("l1_manager") if isinstance(manager, dict) else None
    return float(found.get(f"{lock}_ttl_seconds") or otherwise) if isinstance(found, dict) else otherwise


def _second_tiers(status: Any) -> int | None:
    """How many adapters of a second tier the server has, from a ``/status`` answer; None where it does not say."""
    manager = status.get("storage_manager") if isinstance(status, dict) else None
    found = manager.get("num_l2_adapters") if isinstance(manager, dict) else None
    return found if isinstance(found, int) else None


def registered_clients(status: Any) -> dict[int, str]:
    """Instance id -> model name of all engine-driven registrations in a ``/status`` answer."""
    meta = status.get("non_cuda_context_meta") if isinstance(status, dict) else None
    if not isinstance(meta, dict):
        return {}
    return {int(key): str(entry.get("model_name")) for key, entry in meta.items() if _is_entry(key, entry)}


def _is_entry(key: str, entry: object) -> bool:
    return isinstance(entry, dict) and key.isascii() and key.removeprefix("-").isdigit()


def engine_models(status: Any) -> set[str]:
    """Names of the models that serving engines have registered, from a ``/status`` answer."""
    return set(_engines(status))


@dataclass(frozen=True)
class Registration:
    """One registered model: its name, whether an engine or a client keeps it, its workers, and its cache in words."""

    model_name: str
    by: str
    world_size: int
    cache: str


def registrations(status: Any) -> list[Registration]:
    """Everybody who is registered, from a ``/status`` answer; and models that the embedded server remembers."""
    found = []
    for name, entry in _engines(status).items():
        layout = entry.get("kv_cache_layout") or {}
        groups = layout.get("kernel_groups") or [{}]
        kv_format = str(groups[0].get("engine_kv_format", "unknown format")).rpartition(".")[2]
        cache = (
            f"{kv_format}, {layout.get('num_layers', '?')} layers, {layout.get('cache_size_per_token', '?')} B/token"
        )
        found.append(Registration(name, "engine", registered_world_size(entry), cache))
    remembered = _remembered_layouts(status)
    meta = status.get("non_cuda_context_meta") if isinstance(status, dict) else None
    for entry in (meta or {}).values():
        name = str(entry.get("model_name"))
        known = remembered.pop(name, None)
        found.append(Registration(name, "client", registered_world_size(entry), str(known or "not published")))
    found += [Registration(name, "nobody now", 1, str(layout)) for name, layout in remembered.items()]
    return found


def published_layout(entry: Mapping[str, Any], connection: Connection) -> KVLayout:
    """Geometry of a model from what its engine published.

    Raises `UnsupportedLayout` for MLA, hybrid or unknown caches, and for a fused cache whose heads
    or packing were not given; `GeometryMismatch` when a given layout contradicts the published one.
    """
    name = connection.model_name
    world_size = registered_world_size(entry)
    if connection.world_size not in (None, world_size):
        raise GeometryMismatch(f"{name} is served by {world_size} workers, not by world_size={connection.world_size}")
    try:
        layout = entry["kv_cache_layout"]
        groups: Sequence[Mapping[str, Any]] = layout["kernel_groups"]
        if len(groups) != 1 or groups[0].get("object_group_idx", 0) != 0:
            raise UnsupportedLayout(
                f"{name} is a hybrid model ({len(groups)} kernel groups); only one uniform KV cache can be read"
            )
        group = groups[0]
        if group.get("is_mla"):
            raise UnsupportedLayout(f"{name} uses MLA: its cache holds latents, not keys and values per head")
        kv_format = str(group["engine_kv_format"]).rpartition(".")[2]
        dtype = parse_dtype(str(group["dtype"]))
        num_layers, token_bytes = int(layout["num_layers"]), int(layout["cache_size_per_token"])
        shape = str(group["engine_kv_concrete_shape"])
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        if isinstance(exc, InvalidRequest):
            raise UnsupportedLayout(f"{name}: {exc}") from exc
        raise ProtocolError(f"the server's /status describes {name} in an unknown way: {exc!r}") from exc
    if kv_format in _SPLIT_FORMATS:
        (heads, head_dim), packing = _bracket(shape, _SPLIT_FORMATS[kv_format], name), "split"
        heads *= world_size  # each worker publishes its own share
    elif kv_format in _FUSED_FORMATS:
        (heads, head_dim), packing = _fused(connection, kv_format)
    else:
        raise UnsupportedLayout(f"{name}: cache format {kv_format} cannot be read as [2, L, T, D]")
    try:
        block_size = group.get("tokens_per_block")
        found = KVLayout(num_layers, heads, head_dim, dtype=dtype, packing=packing, block_size=block_size)
    except InvalidRequest as exc:
        raise UnsupportedLayout(f"{name}: {exc}") from exc
    if found.token_bytes != token_bytes * world_size:
        raise GeometryMismatch(
            f"{name}: {found} takes {found.token_bytes} bytes a token, the engine's cache takes "
            f"{token_bytes * world_size}; "
            "check num_kv_heads and head_dim"
        )
    if connection.layout is not None and connection.layout != found:
        raise GeometryMismatch(f"layout= says {connection.layout}, but the engine registered {found} for {name}")
    return found


def registered_world_size(entry: Mapping[str, Any]) -> int:
    """How many workers an engine's registration says share a model's cache."""
    world_size = entry.get("world_size", 1)
    if not isinstance(world_size, int) or not 1 <= world_size <= 255:
        raise ProtocolError(f"the server's /status gives {entry.get('model_name')} the world size {world_size!r}")
    return world_size


def _fused(connection: Connection, kv_format: str) -> tuple[tuple[int, int], str]:
    packing = connection.packing
    if packing == "auto" and connection.layout is not None and connection.layout.fused:
        packing = connection.layout.packing
    if packing == "auto":
        packing = recall_packing(connection) or packing
    if packing in ("auto", "split"):
        raise UnknownPacking(
            f"{connection.model_name}: the engine stores K and V fused ({kv_format}), and different engines order "
            'the bytes differently under that name; say packing="fused" for [K | V] per head, "vllm-cpu" or '
            '"vllm-cpu-amx" for vLLM on a CPU, or find out with `kvdata verify`'
        )
    heads = connection.heads()
    if heads is None:
        raise UnsupportedLayout(
            f"{connection.model_name}: a fused cache does not publish its heads; pass model_config= "
            "(the model's config.json) or layout="
        )
    return heads, packing


def _bracket(shape: str, places: tuple[int, int], name: str) -> tuple[int, int]:
    brackets = re.findall(r"\[([^\]]*)\]", shape)
    try:
        axes = [int(axis) for axis in brackets[-1].split(",")]
        return axes[places[0]], axes[places[1]]
    except (IndexError, ValueError) as exc:
        raise UnsupportedLayout(f"{name}: heads cannot be read from the published shape {shape!r}") from exc


def read_release(http: Http, deadline: Deadline | None = None) -> Release:
    """Which release a server is; `UnsupportedServer` for one that is too old."""
    answer = http.json("GET", "/lmc_version", deadline=deadline)
    try:
        release = parse_release(answer)
    except (TypeError, ValueError) as exc:
        raise ProtocolError(f"{http.url}/lmc_version answered {answer!r}; is this an LMCache server?") from exc
    if release < OLDEST:
        found, oldest = (".".join(map(str, r)) for r in (release, OLDEST))
        raise UnsupportedServer(f"{http.url} runs LMCache {found}; kvdata needs {oldest} or newer")
    return release


@dataclass(frozen=True)
class EventSettings:
    """What a subscriber to KV events must know: the release, and how long it may be silent (0: for ever)."""

    release: Release
    reap_seconds: float


def event_settings(http: Http) -> EventSettings:
    """Read them; `UnsupportedServer` says why a server has no KV events, or none that can be followed."""
    release = read_release(http)
    if release < KV_EVENTS:
        found = ".".join(map(str, release))
        raise UnsupportedServer(f"{http.url} runs LMCache {found}, which has no KV event stream: it came with 0.5.6")
    status, config = http.json("GET", "/status"), http.json("GET", "/config")
    try:
        events, settings = status.get("kv_events"), config["mp"]
        reap_seconds = float(settings.get("worker_reap_timeout_seconds") or 0.0)
        algorithm, enabled = settings.get("hash_algorithm"), events is not None and events["enabled"]
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(f"{http.url} describes its KV events in an unknown way: {exc!r}") from exc
    if events is None:
        raise UnsupportedServer(
            f"{http.url} has no KV event stream (kvdata's embedded server has none); use LMCache's own server, 0.5.6 "
            "or newer"
        )
    if not enabled:
        raise UnsupportedServer(
            f"{http.url} records no KV events; start the server without --disable-observability, and with a "
            "--kv-event-log-size above 0 (the default is 32768)"
        )
    if algorithm != "blake3":
        raise UnsupportedServer(
            f"{http.url} hashes chunks with {algorithm!r}, by which their order cannot be checked; start the server "
            "with --hash-algorithm blake3"
        )
    return EventSettings(release, reap_seconds)


def _check_mode(settings: Mapping[str, Any], url: str) -> None:
    transport = settings.get("transport", "zmq")
    if transport != "zmq":
        raise UnsupportedServer(f"{url} speaks {transport}; start the server with --transport zmq")
    mode = settings.get("supported_transfer_mode", "auto")
    if mode not in ("auto", "engine_driven", "non_gpu"):
        raise UnsupportedServer(
            f"{url} runs in transfer mode {mode} and would not answer; start the server with "
            "--supported-transfer-mode auto"
        )


def _engines(status: Any) -> dict[str, Mapping[str, Any]]:
    """What serving engines registered, by model name; not what the embedded server lists there for LMCache's SDK."""
    meta = status.get("cache_context_meta") if isinstance(status, dict) else None
    if not isinstance(meta, dict):
        return {}
    entries = (e for e in meta.values() if isinstance(e, dict) and e.get("published_by") != "kvdata")
    return {str(e["model_name"]): e for e in entries if "model_name" in e}


def _remembered_layouts(status: Any) -> dict[str, KVLayout]:
    remembered = status.get("kvdata_layouts") if isinstance(status, dict) else None
    if not isinstance(remembered, dict):
        return {}
    return {str(name): KVLayout.from_dict(entry) for name, entry in remembered.items()}
