"""`Claims`: what a server has reserved for stores that have not come to their end."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdata.client.admin import delete
from kvdata.client.deadline import Deadline
from kvdata.client.leftovers import CLEANUP_SECONDS
from kvdata.client.request import Request
from kvdata.errors import KVCacheSDKError, ProtocolError
from kvdata.wire.messages import PreparedStore, decode

if TYPE_CHECKING:
    from kvdata.client.session import Session

log = logging.getLogger("kvdata")


@dataclass(eq=False)
class Claim:
    """Chunks of one worker that a store wants to write, and what the server has reserved for it.

    Attributes:
        reply: what it told; None while that is not known.
        since: when it was asked, `time.monotonic`.
        sent: it was asked: else nothing can be reserved.
        expired: it came to its end, and what is reserved now may be another's.
    """

    request: Request
    chunks: Sequence[int]
    worker: int
    reply: PreparedStore | None = None
    since: float = field(default_factory=time.monotonic)
    sent: bool = False
    expired: bool = False

    def has_left(self) -> None:
        """The question is on its way."""
        self.sent = True

    def answered_late(self, frame: bytes | None) -> None:
        """Take the reply that came after its call had given up."""
        with suppress(ProtocolError):
            self.reply = None if frame is None else decode(frame, PreparedStore)

    @property
    def reserved(self) -> list[int]:
        """Numbers of the chunks that the server has told to be reserved; none that were not asked for."""
        if self.reply is None:
            return []
        told = (self.chunks[0] + index for index in self.reply.context.chunk_indices)
        return [number for number in told if number in self.chunks]


class Claims:
    """The open claims of a session: each ends by `settled` or `abort`.

    Args:
        session: whose.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: list[Claim] = []

    def __bool__(self) -> bool:
        """Whether something may still be reserved on the server."""
        return bool(self._open)

    def make(self, request: Request, chunks: Sequence[int], worker: int, deadline: Deadline) -> Claim:
        """Reserve those of ``chunks`` that are missing: `prepare_store`."""
        session, claim = self._session, Claim(request, chunks, worker)
        self._open.append(claim)
        try:
            with session.waiting():
                reply = session.wire("prepare_store").call(
                    "prepare_store",
                    request.key(chunks[0], worker=worker),
                    session.instance_id,
                    result=PreparedStore,
                    deadline=deadline,
                    late=claim.answered_late,
                    sent=claim.has_left,
                )
            claim.reply = session.told("prepare_store", reply)
        except BaseException as exc:
            # What was never sent has reserved nothing: the chunks, if they are there, are others'.
            if claim.sent or not isinstance(exc, Exception):
                self.abort(claim)
            else:
                self.settled(claim)
            raise
        return claim

    def settled(self, claim: Claim) -> None:
        """Nothing of it is reserved any more."""
        self._open.remove(claim)

    def abort(self, claim: Claim) -> None:
        """Discard what a failed store has reserved before anything could publish it. Never raises.

        Where that fails, `abort_all` tries once more, and a session does not un-register if it fails again: that would
        publish it. So it is while nobody knows what is reserved: chunks that may be others' are never deleted.
        """
        if claim.expired:
            return  # nor would un-registering do another's any good
        try:
            if claim.reply is None:
                self._await(claim)
            if claim.reply is None:
                raise ProtocolError("what it has reserved is not known")
            if claim.reserved:
                delete(self._session, claim.request, claim.reserved, force=True, worker=claim.worker)
            self.settled(claim)
        except KVCacheSDKError as exc:
            self._session.mark_stale()
            log.warning("a failed store could not be aborted (%s); the server drops it after its write TTL", exc)

    def abort_all(self) -> None:
        """At the end of a session."""
        for claim in [*self._open]:
            self.abort(claim)

    def _await(self, claim: Claim) -> None:
        """Wait until the server has come to a `prepare_store` whose reply is outstanding.

        It serves one connection's transfers in their order, so that whatever it answers next comes later. A deletion
        that overtakes a reservation would leave it there.
        """
        wire = self._session.wire("prepare_store")
        if not wire.lost():
            key = claim.request.key(claim.chunks[0], worker=claim.worker)
            deadline = Deadline(CLEANUP_SECONDS)
            wire.call("commit_retrieve", key, self._session.instance_id, result=bool, deadline=deadline)
            wire.call("end_session", claim.request.request_id, result=object, deadline=deadline)  # this began it anew
