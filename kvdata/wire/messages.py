"""Operations and messages of the LMCache multiprocess protocol.

A request is the frames ``[uid, operation number, argument, argument, ...]``, a reply ``[uid, operation
number, result]`` where the result frame is absent for null. Each argument is its own msgpack document and
structs travel as maps. Operation numbers moved between releases; the table below holds all of them.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec

from kvdata.errors import ProtocolError

Release = tuple[int, int, int]
Ids = TypeVar("Ids")
T = TypeVar("T")

NEWEST: Release = (0, 5, 6)

_OPERATIONS = (
    "lookup",
    "query_prefetch_status",
    "free_lookup_locks",
    "end_session",
    "register",
    "unregister",
    "prepare_store",
    "commit_store",
    "prepare_retrieve",
    "commit_retrieve",
    "clear",
    "get_chunk_size",
    "ping",
    "noop",
)

# First release of each numbering, and the numbers in the order of _OPERATIONS (None: not in that release).
_NUMBERS: tuple[tuple[Release, tuple[int | None, ...]], ...] = (
    ((0, 4, 6), (5, 6, 8, 9, 10, None, 11, 12, 13, 14, 15, 16, 17, 19)),
    ((0, 4, 7), (5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20)),
    ((0, 5, 0), (5, 6, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 21)),
    ((0, 5, 3), (8, 9, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 24)),
)
OLDEST: Release = (0, 4, 7)


def parse_release(version: str) -> Release:
    """``"0.5.6.dev3+g12"`` -> ``(0, 5, 6)``; `ValueError` when there is no numeric prefix."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ValueError(f"no release number in {version!r}")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def operation_numbers(release: Release) -> dict[str, int]:
    """Operation name -> wire number for a release. Newer releases keep the newest numbers (frozen since)."""
    numbers = [row for first, row in _NUMBERS if first <= release]
    if not numbers:
        raise ValueError(f"no operation table for release {release}")
    return {name: n for name, n in zip(_OPERATIONS, numbers[-1], strict=True) if n is not None}


def decode(frame: bytes, kind: type[T]) -> T:
    """The value of a frame; `ProtocolError` for bytes that are none of that kind, whatever they are."""
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except (msgspec.MsgspecError, RecursionError) as exc:  # the latter for what is nested a thousand deep
        raise ProtocolError(f"{len(frame)} bytes do not decode: {exc}") from exc


# What a prompt or a cache consists of. It is not for logs, error reports or tracebacks, where reprs end up.
_PRIVATE = ("token_ids", "data")


class Discreet:
    """Makes a struct's repr tell the type of a private field instead of its content."""

    __slots__ = ()

    def __repr__(self) -> str:
        names: tuple[str, ...] = self.__struct_fields__  # type: ignore[attr-defined]
        fields = ((name, getattr(self, name)) for name in names)
        shown = (f"{name}={f'<{type(v).__name__}>' if name in _PRIVATE else repr(v)}" for name, v in fields)
        return f"{type(self).__name__}({', '.join(shown)})"


class Key(Discreet, msgspec.Struct, Generic[Ids], frozen=True):
    """Addresses the chunks of a token range: which model, which tokens, which isolation domain (salt).

    A client's token ids are `msgspec.Raw`: encoded once for all operations on a sequence.
    """

    model_name: str
    world_size: int
    worker_id: int | None
    token_ids: Ids
    start: int
    end: int
    request_id: str
    cache_salt: str = ""
    request_configs: dict[str, Any] | None = None
    num_kv_readers: int = 1

    def identity(self: Key[list[int]]) -> tuple[object, ...]:
        """What a server compares to match a commit with its prepare."""
        return (
            self.model_name,
            self.world_size,
            self.worker_id,
            tuple(self.token_ids),
            self.start,
            self.end,
            self.cache_salt,
        )


CacheKey = Key[list[int]]


class Registration(msgspec.Struct):
    """Registers one engine-driven instance and the shape of its chunks.

    ``use_mla`` means "one plane": MLA, or K and V fused. The last three fields are kvdata's own; the real
    server ignores unknown fields, the embedded one publishes them to later clients.
    """

    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool
    num_physical_slots: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    packing: str | None = None


class Registered(msgspec.Struct):
    """Reply to a registration; an empty name or size 0 means pickle transfer."""

    shm_name: str = ""
    pool_size: int = 0


class Slot(msgspec.Struct):
    """Where one chunk lies in the shared-memory pool."""

    offset: int
    length: int
    shape: list[int]
    dtype: str


class StoreContext(msgspec.Struct):
    """Slots reserved for the missing chunks; ``chunk_indices`` count from the key's start."""

    slots: list[Slot] = []
    chunk_indices: list[int] = []


class PreparedStore(msgspec.Struct):
    """Reply to ``prepare_store``."""

    context: StoreContext


class RetrieveContext(msgspec.Struct):
    """One slot per chunk of the range (empty in pickle mode)."""

    slots: list[Slot] = []


class PreparedRetrieve(Discreet, msgspec.Struct):
    """Reply to ``prepare_retrieve``; ``data`` is a pickle in pickle mode, else empty."""

    success: bool
    data: bytes
    context: RetrieveContext


# The stream of KV events has a name and no number. A release before `KV_EVENTS` would die of it.
KV_EVENTS: Release = (0, 5, 6)
SUBSCRIBE = "subscribe_kv_events"
MAX_EVENTS = 1024  # the most a server takes for one batch
ACK, CANCEL = b"ack", b"cancel"  # control frames of a stream: [uid, empty, ACK]; raw bytes, not msgpack


class KVEvent(Discreet, msgspec.Struct, frozen=True):
    """A change of the cache: ``stored`` brings one chunk's tokens and its parent's hash, ``removed`` only hashes.

    Neither salt nor shard is in it. ``parent_block_hash`` is null for the first chunk of a sequence, and also
    where the server no longer knew the parent.
    """

    seq: int
    kind: str
    model_name: str
    block_hashes: list[bytes]
    parent_block_hash: bytes | None = None
    token_ids: list[int] = []


class KVEventBatch(msgspec.Struct, frozen=True):
    """One message of the stream.

    ``incarnation`` changes when the server restarts, and its cursors begin anew; ``lost`` says that events before
    these were not delivered; ``next_cursor`` is where a new subscription goes on.
    """

    enabled: bool
    incarnation: int
    next_cursor: int
    lost: bool
    events: list[KVEvent]
