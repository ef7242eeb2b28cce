"""The operations of the protocol, as LMCache 0.5.6 answers them.

A public method named like an operation of `kvdata.wire.messages` is that operation, and its annotations are
the types of its wire arguments. What it raises is logged and answered with silence.

Two traps of the real server are left out: a reservation that expires, or whose instance unregisters or
dies, is discarded (there it becomes readable), and a late commit never publishes another writer's buffer.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from kvdata.errors import InvalidRequest, KVCacheSDKError
from kvdata.layout import KVLayout
from kvdata.server.store import ChunkStore, ObjectKey, Reservation
from kvdata.wire import keys, messages, tensors
from kvdata.wire.messages import CacheKey, Registration

log = logging.getLogger("kvdata.server")

REAP_SECONDS = 120.0
GRACE_SECONDS = 3600.0
MAX_READERS = 128
MAX_SHARDS = 256  # kv_rank has one byte for the rank
PRIVATE_MODELS = "kvdata/"
_LOGGED = 100  # characters of what a client sent
NO_CONTEXT: dict[str, Any] = {"context": {}}

Transfer = tuple[int, tuple[object, ...]]  # instance and key: what matches a commit with its prepare


@dataclass
class Instance:
    """A registered client and the chunks it writes."""

    registration: Registration
    slot: messages.Slot
    seen: float
    pinged: bool = False


@dataclass
class Session:
    """What the server remembers of one request id."""

    created: float
    prefix: list[ObjectKey] = field(default_factory=list)
    hits: int = 0  # chunks whose locks free_lookup_locks may release
    result: int = 0  # the same, until the client has asked for it


@dataclass(eq=False)
class Service:
    """State and operations of one server. Callers hold `lock` around every call.

    Args:
        store: its clock is the server's.
        chunk_size: tokens per chunk.
        shm_name: whole name of the store's shared segment, or "" for pickle transfer.
        session_ttl: seconds until a session that was not ended is dropped.
        reap_seconds: of silence after which an instance that once pinged is dropped.
        grace_seconds: the same for one that never pinged.
    """

    store: ChunkStore
    chunk_size: int
    shm_name: str
    session_ttl: float
    reap_seconds: float = REAP_SECONDS
    grace_seconds: float = GRACE_SECONDS
    lock: threading.Lock = field(default_factory=threading.Lock)
    instances: dict[int, Instance] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    layouts: dict[str, KVLayout] = field(default_factory=dict)  # by model name, never forgotten
    _stores: dict[Transfer, list[Reservation]] = field(default_factory=dict, repr=False)  # by whose token ids
    _reads: dict[Transfer, list[ObjectKey]] = field(default_factory=dict, repr=False)

    def lookup(self, key: CacheKey, tp_size: int) -> None:
        """Count and lock the leading chunks of which every shard is readable."""
        _check(key)
        found: list[ObjectKey] = []
        session = self._session(key, found)
        session.hits = 0
        known = (instance.registration for instance in self.instances.values())
        if any((r.model_name, r.world_size) == (key.model_name, key.world_size) for r in known):
            for digest in keys.chunk_hashes(key.token_ids[: max(0, key.end)], self.chunk_size):
                shards = _objects(key, [digest])
                if not all(map(self.store.find, shards)):
                    break
                found += shards
                session.hits += 1
        session.result = session.hits
        self.store.lock(found, min(key.num_kv_readers, MAX_READERS))
        self.store.touch(found)

    def query_prefetch_status(self, request_id: str) -> int:
        """The count of that lookup, once; then 0."""
        session = self.sessions.get(request_id)
        if session is None:
            return 0
        hits, session.result = session.result, 0
        return hits

    def free_lookup_locks(self, key: CacheKey, tp_size: int) -> None:
        """Release what the lookup of this request id locked inside ``[start, end)``."""
        _check(key)
        session = self.sessions.get(key.request_id)
        last = min(key.end // self.chunk_size, session.hits if session is not None else 0)
        hashes = keys.chunk_hashes(key.token_ids[: max(0, last) * self.chunk_size], self.chunk_size)
        first = -(-max(0, key.start) // self.chunk_size)
        self.store.unlock(_objects(key, hashes[first:]), min(key.num_kv_readers, MAX_READERS))

    def end_session(self, request_id: str) -> None:
        """Forget a request id and mark its chunks as just used. Locks stay."""
        session = self.sessions.pop(request_id, None)
        if session is not None:
            self.store.touch(session.prefix)

    def register(self, registration: Registration) -> messages.Registered:
        """Register an instance; a known id is only refreshed, whatever the layout."""
        instance = self.instances.get(registration.instance_id)
        if instance is None:
            slot = _slot(registration, self.chunk_size)
            self.instances[registration.instance_id] = Instance(registration, slot, self.store.clock())
            self._keep_layout(registration)
        else:
            instance.seen = self.store.clock()
        return messages.Registered(self.shm_name, self.store.pool.size if self.shm_name else 0)

    def unregister(self, instance_id: int) -> None:
        """Forget an instance: discard what it reserved and did not commit, unlock what it was reading."""
        self.instances.pop(instance_id, None)
        for transfer in [t for t in self._stores if t[0] == instance_id]:
            self.store.discard(self._stores.pop(transfer))
        for transfer in [t for t in self._reads if t[0] == instance_id]:
            self.store.unlock(self._reads.pop(transfer))

    def prepare_store(self, key: CacheKey, instance_id: int) -> messages.PreparedStore | dict[str, Any]:
        """Reserve the missing chunks of the range: all, or none when they do not all fit."""
        instance, objects = self._active(instance_id), self._range(key)
        if not self.shm_name:
            return NO_CONTEXT
        reserved = self.store.reserve(objects, instance.slot)
        if reserved:
            self._stores.setdefault((instance_id, key.identity()), []).extend(reserved.values())
        slots = [chunk.slot for _, chunk in reserved.values()]
        return messages.PreparedStore(messages.StoreContext(slots, list(reserved)))

    def commit_store(self, key: CacheKey, instance_id: int, data: bytes) -> bool:
        """Publish what the matching prepare reserved, or (with a pickle) reserve, write and publish.

        True does not prove that anything is readable: not after an expiry, an abort, or without room.
        """
        instance, objects = self._active(instance_id), self._range(key)
        if data or not self.shm_name:
            chunks = _load(data, instance.slot, len(objects))
            if any(list(chunk.shape) != instance.slot.shape for chunk in chunks):
                return False
            reserved = self.store.reserve(objects, instance.slot)
            for i, (_, chunk) in reserved.items():
                self.store.tensor(chunk).copy_(chunks[i])
            self.store.publish(reserved.values())
        else:
            pending = self._stores.pop((instance_id, key.identity()), None)
            if pending is None:
                return False
            self.store.publish(pending)
        self.store.touch(self.sessions[key.request_id].prefix)
        return True

    def prepare_retrieve(self, key: CacheKey, instance_id: int) -> messages.PreparedRetrieve | dict[str, Any]:
        """Slots (or a pickle) of a range of which every chunk is locked; a failure costs one lock each."""
        self._active(instance_id)
        objects = self._range(key)
        if not objects or not all(map(self.store.locks, objects)):
            self.store.unlock(objects)
            return {"success": False, "data": b"", **NO_CONTEXT}
        chunks = [chunk for chunk in map(self.store.find, objects) if chunk is not None]
        if not self.shm_name:
            data = tensors.dumps([self.store.tensor(chunk) for chunk in chunks])
            self.store.unlock(objects)
            return {"success": True, "data": data, **NO_CONTEXT}
        self._reads[instance_id, key.identity()] = objects
        context = messages.RetrieveContext([chunk.slot for chunk in chunks])
        return messages.PreparedRetrieve(True, b"", context)

    def commit_retrieve(self, key: CacheKey, instance_id: int) -> bool:
        """Release the locks that the matching prepare used."""
        self._active(instance_id)
        self.store.unlock(self._reads.pop((instance_id, key.identity()), []))
        return True

    def clear(self, force: bool) -> None:
        """Remove all chunks; without ``force`` the locked and reserved ones stay."""
        self.store.clear(force)

    def get_chunk_size(self) -> int:
        """Tokens per chunk."""
        return self.chunk_size

    def ping(self, instance_id: int | None) -> bool:
        """Sign of life; from now on the instance is dropped after `REAP_SECONDS` without one."""
        if instance_id in self.instances:
            self._active(instance_id).pinged = True
        return True

    def noop(self) -> str:
        """Shows that the socket is served."""
        return "OK"

    def tick(self) -> None:
        """Drop what expired: reservations, sessions, silent instances; evict. Due once a second."""
        now = self.store.clock()
        self.store.tick()
        # What was given up is not kept for a commit that may never come, nor what nobody holds a lock on any more.
        self._stores = {t: pending for t, pending in self._stores.items() if not self.store.gone(pending)}
        self._reads = {t: objects for t, objects in self._reads.items() if any(map(self.store.locks, objects))}
        for request_id in [r for r, s in self.sessions.items() if now - s.created > self.session_ttl]:
            del self.sessions[request_id]
        for instance_id, instance in list(self.instances.items()):
            if now - instance.seen > (self.reap_seconds if instance.pinged else self.grace_seconds):
                self.unregister(instance_id)

    def _session(self, key: CacheKey, prefix: list[ObjectKey]) -> Session:
        session = self.sessions.setdefault(key.request_id, Session(self.store.clock()))
        session.prefix = prefix
        return session

    def _active(self, instance_id: int) -> Instance:
        instance = self.instances.get(instance_id)
        if instance is None:
            raise InvalidRequest(f"instance {instance_id} is not registered")
        instance.seen = self.store.clock()
        return instance

    def _range(self, key: CacheKey) -> list[ObjectKey]:
        """Chunks of ``[start, end)`` of one shard; their whole prefix becomes the session's."""
        _check(key)
        aligned = key.start % self.chunk_size == 0 and key.end % self.chunk_size == 0
        if key.worker_id is None or not aligned or key.start < 0 or key.end > len(key.token_ids):
            raise InvalidRequest(
                f"[{key.start}, {key.end}) of worker {key.worker_id} does not name whole chunks "
                f"of {self.chunk_size} among {len(key.token_ids)} tokens"
            )
        prefix = _objects(key, keys.chunk_hashes(key.token_ids[: max(0, key.end)], self.chunk_size))
        self._session(key, prefix)
        return prefix[key.start // self.chunk_size :]

    def _keep_layout(self, r: Registration) -> None:
        """Remember a fully described layout, so that later clients can connect by model name alone."""
        if (
            r.model_name.startswith(PRIVATE_MODELS)
            or r.world_size != 1
            or None in (r.num_kv_heads, r.head_dim, r.packing)
        ):
            return
        fields = {f: getattr(r, f) for f in ("num_layers", "num_kv_heads", "head_dim", "block_size")}
        try:
            layout = KVLayout.from_dict({**fields, "dtype": r.dtype_str, "packing": r.packing})
        except KVCacheSDKError as exc:
            log.warning("layout of %r is not published: %.*s", r.model_name[:_LOGGED], _LOGGED, exc)
            return
        if r.hidden_dim_size == layout.hidden * (1 + layout.fused) and r.use_mla == layout.fused:
            self.layouts[r.model_name] = layout


def _check(key: CacheKey) -> None:
    keys.check_salt(key.cache_salt)
    if "@" in key.model_name or key.num_kv_readers < 1:
        raise InvalidRequest(f"model name {key.model_name!r} with '@', or no readers ({key.num_kv_readers})")


def _objects(key: CacheKey, hashes: list[bytes]) -> list[ObjectKey]:
    """Objects of some chunks: of the key's shard, or of all shards when it names none."""
    world = range(min(key.world_size, MAX_SHARDS)) if key.worker_id is None else (key.worker_id,)
    ranks = [keys.kv_rank(key.world_size, rank) for rank in world]
    return [(digest, key.model_name, rank, key.cache_salt) for digest in hashes for rank in ranks]


def _slot(r: Registration, chunk_size: int) -> messages.Slot:
    """Shape and size of the chunks that an instance will write."""
    dtype = getattr(torch, r.dtype_str, None)
    slots = chunk_size if r.num_physical_slots is None else r.num_physical_slots
    shape = [] if r.use_mla else [2]
    shape += [r.num_layers, slots, r.hidden_dim_size]
    if not isinstance(dtype, torch.dtype) or min(shape) < 1 or r.world_size < 1:
        raise InvalidRequest(f"impossible registration {r}")
    return messages.Slot(0, math.prod(shape) * dtype.itemsize, shape, r.dtype_str)


def _load(data: bytes, slot: messages.Slot, count: int) -> list[torch.Tensor]:
    dtype: torch.dtype = getattr(torch, slot.dtype)
    return tensors.loads(data, dtype, slot.length // dtype.itemsize, count)
