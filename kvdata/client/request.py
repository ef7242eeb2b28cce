"""`Request`: one token sequence on its way through the operations of a server."""

from __future__ import annotations

import itertools
import math
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from kvdata.client.rpc import Call
from kvdata.wire.messages import Key

_nonce = itertools.count(secrets.randbits(31))


@dataclass(frozen=True)
class Request:
    """One token sequence under one fresh request id.

    A server caches a request's chunk hashes by its id, so an id is never used for two sequences. The nonce
    after the last whole chunk changes no hash, but keeps two transfers of the same tokens apart.

    Attributes:
        until: `time.monotonic` until which the server keeps every lock that was taken for it.
    """

    model_name: str
    world_size: int
    salt: str
    chunk_size: int
    ids: list[int] = field(repr=False)
    request_id: str
    until: float = math.inf

    @classmethod
    def create(
        cls,
        model_name: str,
        world_size: int,
        salt: str,
        chunk_size: int,
        ids: Sequence[int],
        until: float = math.inf,
    ) -> Request:
        """A request over all whole chunks of ``ids``."""
        whole = list(ids[: len(ids) // chunk_size * chunk_size])
        whole.append(next(_nonce) & 0x7FFFFFFF)
        return cls(model_name, world_size, salt, chunk_size, whole, f"kvdata-{uuid.uuid4().hex}", until)

    @property
    def chunks(self) -> int:
        """Whole chunks in the sequence."""
        return len(self.ids) // self.chunk_size

    @cached_property
    def _encoded(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode(self.ids))

    def key(self, start: int = 0, stop: int | None = None, worker: int | None = None) -> Key[msgspec.Raw]:
        """Key of the chunks ``start .. stop``; ``worker=None`` means all shards (lookup and free)."""
        return Key(
            model_name=self.model_name,
            world_size=self.world_size,
            worker_id=worker,
            token_ids=self._encoded,
            start=start * self.chunk_size,
            end=(self.chunks if stop is None else stop) * self.chunk_size,
            request_id=self.request_id,
            cache_salt=self.salt,
        )

    def free(self, start: int = 0, stop: int | None = None, worker: int | None = None) -> Call:
        """Releases what the lookup locked of the chunks ``start .. stop``."""
        return Call("free_lookup_locks", (self.key(start, stop, worker), 1), self.until)

    def end(self) -> Call:
        """Makes the server forget the request's id."""
        return Call("end_session", (self.request_id,))
