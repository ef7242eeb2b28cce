"""`KVCacheContext`: KV of a token sequence out of a running server, and back in.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``D = num_kv_heads * head_dim``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType

import torch

from kvdata.client import admin
from kvdata.client.connection import Connection
from kvdata.client.deadline import Deadline
from kvdata.client.naming import named
from kvdata.client.reading import Lease, Leases, gather, views
from kvdata.client.selection import WHOLE, Index, Selection
from kvdata.client.session import Session
from kvdata.client.sessions import Sessions, Stats
from kvdata.client.storing import StoreReport, store_chunks
from kvdata.client.transfer import Vanished
from kvdata.client.verify import Model, Verification, verify
from kvdata.errors import (
    CacheLocked,
    GeometryMismatch,
    InvalidRequest,
    LeaseLost,
    ServerError,
)
from kvdata.layout import KVLayout
from kvdata.wire.keys import Tokens, check_salt, token_list

_POLL_SECONDS = 0.05
_RELEASE_SECONDS = 0.3


class KVCacheContext:
    """A process's access to one model's KV cache in a running server.

    Lazy: the handshake happens at first use, again after a fork, and again after the server restarted.
    Pickling carries the `Connection` only. Thread-safe. Use it with ``with``, or `close` it.

    Args:
        connection: where the server is and which model is meant.
    """

    def __init__(self, connection: Connection) -> None:
        self.last_store: StoreReport | None = None
        self._sessions = Sessions(connection)

    @property
    def connection(self) -> Connection:
        """Where the server is, and how much time its calls have. One with another time-out holds for later calls."""
        return self._sessions.connection

    @connection.setter
    def connection(self, connection: Connection) -> None:
        self._sessions.connection = connection

    # -- life cycle ---------------------------------------------------------------------------------

    def open(self) -> KVCacheContext:
        """Shake hands now instead of at first use."""
        self._sessions.current()
        return self

    def close(self) -> None:
        """Un-register and close. Later calls raise `InvalidRequest`; closing twice is harmless."""
        self._sessions.close()

    def __enter__(self) -> KVCacheContext:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[KVCacheContext], tuple[Connection]]:
        return KVCacheContext, (self.connection,)

    @property
    def layout(self) -> KVLayout:
        """Geometry and packing of the model's cache."""
        return self._sessions.current().layout

    @property
    def chunk_size(self) -> int:
        """Tokens in one of the server's chunks; only whole chunks are stored and found."""
        return self._sessions.current().chunk_size

    def whole_chunks(self, tokens: Tokens) -> int:
        """How many leading tokens of ``tokens`` fill whole chunks: as many can be cached."""
        return len(tokens) // self.chunk_size * self.chunk_size

    @property
    def transfer(self) -> str:
        """How chunks travel: the name of the shared-memory pool, or pickles. For people; code need not care."""
        pool = self._sessions.current().pool
        return f"shared memory {pool.path.name}, {pool.size:,} bytes" if pool else "pickles over ZMQ"

    def stats(self) -> dict[str, int]:
        """Counters since this context was made (in this process)."""
        return asdict(self._stats)

    # -- reading ------------------------------------------------------------------------------------

    def lookup(self, tokens: Tokens, cache_salt: str = "") -> int:
        """How many leading tokens of ``tokens`` the server holds (whole chunks). Holds no lock afterwards.

        Raises `ModelNotRegistered` instead of reporting a miss when the server does not know the model.
        """
        return self.lookup_many([tokens], cache_salt)[0]

    def lookup_many(self, prefixes: Sequence[Tokens], cache_salt: str | Sequence[str] = "") -> list[int]:
        """`lookup` of several prefixes, in flight together; one salt for all, or one each."""
        leases = self._lease("lookup", self._wanted(prefixes, cache_salt))
        try:
            return [lease.hit for lease in leases.each]
        finally:
            leases.close()

    def wait_cached(self, tokens: Tokens, cache_salt: str = "", seconds: float = 20.0) -> int:
        """Look up until all whole chunks of ``tokens`` are there, or `seconds` have passed; returns the last count.

        Engines store after they have answered, so their last chunks come late. Looks at least once; errors as
        `lookup`.
        """
        wanted = self.whole_chunks(tokens)
        end = time.monotonic() + seconds
        while (found := self.lookup(tokens, cache_salt)) < wanted and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return found

    def retrieve(
        self,
        tokens: Tokens,
        cache_salt: str = "",
        *,
        layers: Index = None,
        heads: Index = None,
        window: slice | None = None,
        kinds: Sequence[str] = ("k", "v"),
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """KV of the cached prefix of ``tokens``, or the part of it that is asked for: only that is copied.

        Args:
            tokens: token ids from position 0.
            cache_salt: isolation domain of the cache.
            layers, heads, window, kinds: as in `Selection`.
            out: ``[2', L', T, D']`` CPU tensor to copy into, ``T`` at least the tokens wanted (any strides whose last
                axis is contiguous; another dtype converts); the result is its first tokens.

        Returns:
            Contiguous ``[2', L', T', D']`` of the layout's dtype (or the view of ``out``), ``T'`` the hit, a whole
            number of chunks, or the window of it; None when ``tokens`` is shorter than a chunk or nothing of it is
            cached.

        Raises:
            ModelNotRegistered: the server does not know the model, so this is not a miss.
            GeometryMismatch: ``out``, ``layers`` or ``heads`` do not fit.
            ServerError: see `kvdata.errors`.
        """
        selection = Selection(layers, heads, window, kinds)
        outs = None if out is None else lambda hits: [out]
        return self.retrieve_many([tokens], cache_salt, selection, outs)[0]

    def retrieve_many(
        self,
        prefixes: Sequence[Tokens],
        cache_salt: str | Sequence[str] = "",
        selection: Selection = WHOLE,
        outs: Callable[[list[int]], Sequence[torch.Tensor | None]] | None = None,
    ) -> list[torch.Tensor | None]:
        """`retrieve` of several prefixes, whose requests are in flight together.

        Args:
            prefixes: token ids of each.
            cache_salt: one for all, or one each.
            selection: what to copy of each.
            outs: gets the hits in tokens, and returns where to copy each one to (see ``out`` of `retrieve`), or None
                for one that is not wanted. Called again when the server lost some of them while they were copied.
        """
        found: list[torch.Tensor | None] = []

        def copy(leases: Leases, deadline: Deadline) -> None:
            targets = outs([lease.hit for lease in leases.each]) if outs else [None] * len(leases.each)
            found.clear()
            for lease, out in zip(leases.each, targets, strict=True):
                leases.check()
                wanted = lease.hit and (out is not None or not outs)
                found.append(gather(lease, leases.session.layout, selection, out) if wanted else None)
            leases.confirm(deadline)

        leases = self._lease("retrieve", self._wanted(prefixes, cache_salt), selection, copy)
        leases.close()
        stored = leases.session.layout.dtype
        for kv in found:
            if kv is not None:
                self._stats.retrieved_tokens += kv.shape[2]
                self._stats.retrieved_bytes += kv.numel() * stored.itemsize
        return found

    @contextmanager
    def lease(self, tokens: Tokens, cache_salt: str = "") -> Iterator[list[torch.Tensor]]:
        """Views of the cached prefix in the server's memory, without a copy.

        Yields one strided view ``[2, L, chunk, H, S]`` per cached chunk, none on a miss. The chunks cannot be
        evicted inside the block; the views are invalid after it, and after the server's read TTL (300 s by
        default). In pickle mode they are copies, and nothing is locked; with tensor parallelism and in packing
        ``vllm-cpu`` they are copies too. Treat them as read-only: writing
        changes the cache itself.

        Raises:
            LeaseLost: at the end of the block: the chunks may not have been there, and locked, all the time. What was
                made of the views must not be used.
            ServerError: see `kvdata.errors`.
        """
        leases = self._lease("lease", self._wanted([tokens], cache_salt), WHOLE)
        try:
            yield views(leases.each[0], leases.session.layout)
            self._confirm(leases)
        finally:
            leases.close()

    def settle(self) -> None:
        """Wait until the server has released what earlier reads had locked, and counted it as read.

        A read does not wait for that: the server does it while this process goes on. Never raises.
        """
        self._sessions.settle()

    # -- writing ------------------------------------------------------------------------------------

    def store(self, kv: torch.Tensor, tokens: Tokens, cache_salt: str = "") -> bool:
        """Store KV under token ids, whole chunks only.

        Args:
            kv: CPU ``[2, L, T, D]`` of the layout's dtype.
            tokens: the ``T`` token ids that address it.
            cache_salt: isolation domain of the cache.

        Returns:
            True when something new was committed and confirmed readable; False when every chunk was there
            already (a server never overwrites: use another salt, or `delete` first). See `last_store`.

        Raises:
            GeometryMismatch, InvalidRequest: nothing was sent.
            PoolFull: no room, also after waiting for eviction.
            StoreConflict: another writer is filling the same chunks.
            StoreFailed: committed, but not readable.
            ServerError: see `kvdata.errors`.
        """
        ids = _checked(tokens, cache_salt)
        if len(ids) != kv.shape[2 if kv.ndim == 4 else 0]:
            raise GeometryMismatch(f"{len(ids)} tokens for kv of shape {tuple(kv.shape)}; they must agree in T")

        def attempt(session: Session, deadline: Deadline) -> StoreReport:
            session.layout.check(kv)
            if len(ids) < session.chunk_size:
                raise InvalidRequest(
                    f"{len(ids)} tokens are less than one chunk of {session.chunk_size}: nothing could be stored"
                )
            return store_chunks(session, kv, ids, cache_salt, deadline)

        report = self.last_store = self._sessions.attempt("store", attempt)
        self._stats.stores += 1
        self._stats.stored_chunks += report.stored
        self._stats.deduplicated_chunks += report.deduplicated
        self._stats.stored_bytes += report.bytes
        return report.stored > 0

    def delete(self, tokens: Tokens, cache_salt: str = "") -> int:
        """Remove all whole chunks of ``tokens`` from the server's memory; returns how many objects were there (one a
        chunk and worker).

        Chunks that other prompts share (a common head) go too. Raises `CacheLocked` when a reader holds
        some; the others are deleted then.
        """
        ids = _checked(tokens, cache_salt)

        def attempt(session: Session, _deadline: Deadline) -> tuple[int, int]:
            request = session.request(ids, cache_salt)  # only names the chunks; nothing is opened by it
            return admin.delete(session, request, range(request.chunks)) if request.chunks else (0, 0)

        deleted, locked = self._sessions.attempt("delete", attempt)
        patience = Deadline(_RELEASE_SECONDS)
        while locked and patience.remaining():  # a reader that has just finished is not waited for by anybody else
            time.sleep(_POLL_SECONDS)
            more, locked = self._sessions.attempt("delete", attempt)
            deleted += more
        if locked:
            said = f"{locked} chunks are being read and were kept ({deleted} deleted); delete again later"
            with named("delete", self.connection):
                raise CacheLocked(said)
        return deleted

    def verify(self, model: Model, tokens: Tokens, cache_salt: str = "") -> Verification:
        """Compare a cached prefix with a forward of ``model``; see `kvdata.client.verify.verify`."""
        return verify(self.connection, model, _checked(tokens, cache_salt), cache_salt)

    # -- beneath both -------------------------------------------------------------------------------

    @property
    def _stats(self) -> Stats:
        return self._sessions.stats

    def _confirm(self, leases: Leases) -> None:
        """`LeaseLost` unless the server says that what was leased was there until now."""
        try:
            leases.confirm(Deadline(self.connection.timeout))
        except (Vanished, ServerError) as exc:
            raise LeaseLost(
                f"lease: {self.connection.url} did not confirm that it kept what was leased ({exc}); throw away what "
                "was made of the views, and lease again"
            ) from exc

    def _wanted(self, prefixes: Sequence[Tokens], salts: str | Sequence[str]) -> list[tuple[list[int], str]]:
        each = [salts] * len(prefixes) if isinstance(salts, str) else salts
        if len(each) != len(prefixes):
            raise InvalidRequest(f"{len(each)} salts for {len(prefixes)} prefixes")
        return [(_checked(tokens, salt), salt) for tokens, salt in zip(prefixes, each, strict=True)]

    def _lease(
        self,
        operation: str,
        wanted: list[tuple[list[int], str]],
        selection: Selection | None = None,
        use: Callable[[Leases, Deadline], None] = lambda leases, deadline: None,
    ) -> Leases:
        """Prefixes looked up, with a selection mapped, and used. The caller closes them."""

        def attempt(session: Session, deadline: Deadline) -> Leases:
            leases = Leases(session, wanted, wait=operation != "retrieve")
            try:
                leases.look_up(deadline)
                _check_registered(session, leases, deadline)
                if selection is not None:
                    leases.prepare(deadline, selection)
                use(leases, deadline)
            except BaseException:  # an interrupt must not leave locks behind either
                leases.close()
                raise
            return leases

        leases = self._sessions.attempt(operation, attempt)
        self._count(leases.each)
        return leases

    def _count(self, leases: list[Lease]) -> None:
        self._stats.lookups += len(leases)
        for lease in leases:
            self._stats.hits += lease.chunks == lease.request.chunks > 0
            self._stats.partial_hits += 0 < (lease.chunks or 0) < lease.request.chunks
            self._stats.misses += lease.hit == 0


def _check_registered(session: Session, leases: Leases, deadline: Deadline) -> None:
    """`Vanished` where misses are none: the server forgot the model, though the objects may all be there."""
    missed = any(not lease.hit and lease.request.chunks for lease in leases.each)
    if missed and not admin.is_registered(session, deadline):  # restarted, or the engine was reaped
        session.mark_stale()
        raise Vanished(f"the server at {session.connection.url} forgot {session.connection.model_name!r}")


def _checked(tokens: Tokens, salt: str) -> list[int]:
    check_salt(salt)
    return token_list(tokens)
