"""Storing one compressed cache after another: compared with what was there, listed, and a sample read back later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from blake3 import blake3

from kvdata.client.context import KVCacheContext
from kvdata.client.storing import StoreReport
from kvdata.datasets.manifest import Written
from kvdata.edits.address import source_digest
from kvdata.errors import InvalidRequest, StoreConflict, StoreFailed
from kvdata.lightning.cache_write import CacheWrite, WriteCounts
from kvdata.lightning.kept import Address, Kept
from kvdata.lightning.manifest_part import ManifestPart


class CacheStore:
    """Stores `CacheWrite`s through a context.

    Args:
        ctx: of the server and model to write to.
        part: where stored caches are listed.
        counts: are added to.
        verify_every: of every so many caches one, the first, is a sample; 0 for none.
        kept: what was stored is added to it, for `restore`.
    """

    def __init__(
        self,
        ctx: KVCacheContext,
        part: ManifestPart | None,
        counts: WriteCounts,
        verify_every: int,
        kept: Kept | None = None,
    ) -> None:
        self._ctx, self._part, self._counts, self._verify_every, self._kept = ctx, part, counts, verify_every, kept
        self._written = 0
        self._handshakes = 1  # with which all that was stored is there
        self._samples: dict[Address, bytes] = {}  # digest of each that is to be read back

    def store(self, write: CacheWrite) -> None:
        """Store and list one.

        Raises:
            StoreConflict: its address holds other content.
            InvalidRequest: not whole chunks, or labels that JSON cannot hold.
            KVCacheSDKError: as `KVCacheContext.store`.
        """
        tokens, salt = write.address()
        if len(tokens) % self._ctx.chunk_size:
            raise InvalidRequest(f"{len(tokens)} kept tokens are not whole chunks of {self._ctx.chunk_size}")
        kv = write.kv.to("cpu", self._ctx.layout.dtype)
        report = self._put(kv, tokens, salt)
        new = report.stored > 0
        self._counts.stored += new
        self._counts.deduplicated += not new
        self._counts.chunks += report.stored
        self._counts.bytes += report.bytes
        if self._verify_every and self._written % self._verify_every == 0:
            self._samples[tuple(tokens), salt] = _digest(kv)
        self._written += 1
        if self._part is not None:
            self._part.add(_entry(write, kv, "stored" if new else "deduplicated"))
        if self._kept is not None:
            self._kept.add((tuple(tokens), salt), kv)

    def restore(self) -> None:
        """Store again what a server that was away has lost.

        Raises:
            StoreFailed: it has lost some that are not kept any more.
            KVCacheSDKError: as `KVCacheContext.store`.
        """
        if self._kept is None or self._ctx.open().stats()["handshakes"] == self._handshakes:
            return
        gone = self._kept.gone(self._ctx.lookup_many)
        for (tokens, salt), kv in gone.items():
            if kv is not None:
                self._put(kv, list(tokens), salt)
                self._counts.restored += 1
        self._handshakes = self._ctx.stats()["handshakes"]
        self._give_up([address for address, kv in gone.items() if kv is None])

    def _give_up(self, lost: Sequence[Address]) -> None:
        """`StoreFailed` when there are some."""
        for address in lost:
            assert self._kept is not None
            self._kept.forget(address)
            self._samples.pop(address, None)
        self._counts.failed += len(lost)
        if lost:
            raise StoreFailed(
                f"the server was away, and has lost {len(lost)} caches that were stored before and are not in memory "
                "any more: run the same again, or keep more with max_pending_bytes="
            )

    def _put(self, kv: torch.Tensor, tokens: list[int], salt: str) -> StoreReport:
        self._ctx.store(kv, tokens, salt)
        report = self._ctx.last_store
        assert report is not None
        if report.deduplicated and not _equal(self._read(tokens, salt), kv):
            raise StoreConflict(
                f"salt {salt!r} holds another cache of the same source; give the new weights a new revision="
            )
        return report

    def samples(self) -> Iterator[tuple[Address, bytes]]:
        """Address and digest of what is to be read back, each once."""
        while self._samples:
            yield self._samples.popitem()

    def verify(self, address: Address, digest: bytes) -> None:
        """Read one back; `StoreFailed` names its address when it isn't there any more, or differs in a bit."""
        tokens, salt = address
        found = self._read(list(tokens), salt)
        if found is None:
            self.restore()  # the server may have restarted just now
            found = self._read(list(tokens), salt)
        whole = found is not None and found.shape[2] == len(tokens)
        if found is None or not whole or _digest(found) != digest:
            raise StoreFailed(
                f"the server holds {'other content' if whole else 'not all of it'} where {len(tokens)} tokens were "
                f"stored under salt {salt!r}; was it evicted (give the server more "
                "memory) or changed by another client?"
            )
        self._counts.verified += 1

    def _read(self, tokens: list[int], salt: str) -> torch.Tensor | None:
        found = self._ctx.retrieve(tokens, salt)
        self._counts.chunks_read += 0 if found is None else found.shape[2] // self._ctx.chunk_size
        return found


def _entry(write: CacheWrite, kv: torch.Tensor, result: str) -> Written:
    tokens, salt = write.address()
    return Written(
        source=source_digest(write.source_tokens),
        source_tokens=len(write.source_tokens),
        tokens=tokens,
        salt=salt,
        policy=write.policy,
        revision=write.revision,
        bytes=kv.numel() * kv.element_size(),
        result=result,
        meta=dict(write.meta),
    )


def _equal(found: torch.Tensor | None, kv: torch.Tensor) -> bool:
    return found is not None and found.shape == kv.shape and torch.equal(found, kv)


def _digest(kv: torch.Tensor) -> bytes:
    return blake3(kv.contiguous().view(torch.uint8).flatten().numpy().data).digest()
