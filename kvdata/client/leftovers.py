"""`Leftovers`: what a server still keeps for one connection, and how it gets it back."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvdata.client.deadline import Deadline
from kvdata.client.request import Request
from kvdata.client.rpc import Call, Rpc
from kvdata.errors import KVCacheSDKError

log = logging.getLogger("kvdata")

# Releasing what a failed call still holds may take this long beyond the call's own deadline.
CLEANUP_SECONDS = 2.0
_LAST = ("end_session", "unregister")  # a release after its session's end would begin the session anew


class Leftovers:
    """Gives locks, sessions and registrations back over the connection that holds them, or over the next one.

    Nothing here raises, for it is called while something else is failing.

    Args:
        rpc: the connection.
        stale: set when nothing more is to be asked over it; and by what fails here.
        frees_its_own: whether `free_lookup_locks` releases what that request has locked, and nothing else.
    """

    def __init__(self, rpc: Rpc, stale: threading.Event, frees_its_own: bool) -> None:
        self._rpc, self._stale, self._frees_its_own = rpc, stale, frees_its_own
        self._pid = os.getpid()
        self._owed: list[Call] = []
        self._unanswered: list[Request] = []  # lookups that were given up before it was known what they lock

    def give_back(self, calls: Sequence[Call], wait: bool = True) -> None:
        """Operations that give something back to the server; waits briefly for them, or not at all."""
        if not calls or self._pid != os.getpid():
            return
        if self._stale.is_set() or self._rpc.lost():
            # Not now: a server that is only slow has not even done yet what is to be undone.
            self._owed += calls
            return
        # A server's workers may overtake each other.
        phases = [[call for call in calls if call.operation not in _LAST]]
        phases += [[call for call in calls if call.operation == name] for name in _LAST]

        def post() -> None:
            self._rpc.post(*phases)
            if wait:
                self._rpc.settle(Deadline(CLEANUP_SECONDS))

        names = ", ".join(sorted({call.operation for call in calls}))
        if not self._tried(names, post):  # one lost reply must not keep the rest from being given back
            self._tried(names, self._reclaim)

    def settle(self) -> None:
        """Wait until the server has done what `give_back` did not wait for."""
        if self._pid != os.getpid():
            return
        if not self._tried("clean-up", lambda: self._rpc.settle(Deadline(CLEANUP_SECONDS))):
            self._tried("clean-up", self._reclaim)

    def give_up(self, request: Request) -> None:
        """Give back what a lookup without an answer locks, once the server tells what that is."""
        self._unanswered.append(request)

    def finish(self, deadline: Deadline) -> None:
        """See what has become of the lookups that were given up, until the deadline."""
        while self._unanswered:
            asked, self._unanswered = self._unanswered, []
            for request in asked:
                if not self._tried("lookup", partial(self._finish, request)):
                    self._unanswered.append(request)
            if not self._unanswered or not deadline.remaining() or self._stale.is_set():
                return
            time.sleep(0.02)

    def _finish(self, request: Request) -> None:
        deadline = Deadline(CLEANUP_SECONDS)
        found = self._rpc.call("query_prefetch_status", request.request_id, result=int, deadline=deadline)
        if found is None:  # still loading
            self._unanswered.append(request)
            return
        locked = request.chunks if self._frees_its_own else found
        self.give_back([*([request.free(0, locked)] if locked else []), request.end()])

    def taken(self) -> list[Call]:
        """What could not be given back over this connection; it is forgotten here."""
        owed, self._owed = self._owed, []
        return owed + (self._rpc.take_unfinished() if self._rpc.lost() else [])

    def unanswered_to(self, successor: Leftovers) -> None:
        """The next connection to the same server asks about the lookups that were given up."""
        successor._unanswered += self._unanswered
        self._unanswered = []

    def last_chance(self) -> None:
        """Send what is owed, without waiting; the connection is closed after that."""
        if self._owed and not self._rpc.lost():
            self._tried("clean-up", lambda: self._rpc.post(self._owed))

    def _reclaim(self) -> None:
        self._owed += self._rpc.take_unfinished()

    def _tried(self, names: str, action: Callable[[], object]) -> bool:
        if self._rpc.lost():
            return True
        try:
            action()
        except KVCacheSDKError as exc:
            self._stale.set()
            log.warning("%s failed during clean-up (%s); the server drops the leftovers by itself", names, exc)
            return False
        return True
