"""What a module hands to a `KVCacheWriter`, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvdata.edits.address import compressed_address


@dataclass  # not frozen: Lightning copies what a step puts out field by field
class CacheWrite:
    """One compressed cache to be stored.

    Attributes:
        kv: ``[2, L, T', D]``, ``T'`` a whole number of chunks. It must not be changed any more.
        source_tokens: token ids of the whole prefix it was made from.
        policy: what made it, e.g. ``"keydiff"``; part of the salt.
        revision: changes with the policy's weights; part of the salt.
        prefix: salt of the source's own cache, which starts the derived one.
        meta: labels for the manifest.
    """

    kv: torch.Tensor = field(repr=False)
    source_tokens: Sequence[int] = field(repr=False)
    policy: str
    revision: str = "r1"
    prefix: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of ``kv``."""
        return self.kv.numel() * self.kv.element_size()

    def address(self) -> tuple[list[int], str]:
        """Token ids and salt under which it is stored and an engine finds it."""
        tokens, salt = compressed_address(
            self.source_tokens, self.kv.shape[2], self.policy, revision=self.revision, prefix=self.prefix
        )
        return list(tokens), salt


@dataclass
class WriteCounts:
    """What became of the writes handed over so far, on this rank.

    Attributes:
        stored, deduplicated: caches that are new on the server, and that were there already (or came there by a try
            whose outcome stayed unknown).
        failed: caches that were not stored, or were not found again.
        chunks, bytes: stored.
        verified: stored caches that were read back and are the same, bit for bit.
        chunks_read: read for that, and to compare what was there already.
        retries: tries after others that the server did not answer.
        restored: caches that were stored again, because a server that was away had lost them.
        wait_seconds: that batches have waited for room in the queue.
    """

    stored: int = 0
    deduplicated: int = 0
    failed: int = 0
    chunks: int = 0
    bytes: int = 0
    verified: int = 0
    chunks_read: int = 0
    retries: int = 0
    restored: int = 0
    wait_seconds: float = 0.0
