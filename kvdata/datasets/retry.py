"""Trying again what may go better a moment later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from kvdata.errors import KVCacheSDKError, ServerTimeout, ServerUnreachable

T = TypeVar("T")

TRANSIENT = (ServerUnreachable, ServerTimeout)
# A restart takes seconds: waits at random from nothing on could all be over before it is, and after long ones the
# server may be away again.
_FIRST_WAIT, _LONGEST_WAIT, _JITTER = 1.0, 8.0, 1.0

_ended: ContextVar[threading.Event | None] = ContextVar("kvdata_ended", default=None)


def end_retries_with(event: threading.Event) -> None:
    """Once ``event`` is set, this thread's `with_retries` wait no longer and try nothing again."""
    _ended.set(event)


def with_retries(
    action: Callable[[], T],
    retries: int,
    counted: Callable[[], object],
    errors: tuple[type[KVCacheSDKError], ...] = TRANSIENT,
    seconds: float | None = None,
) -> T:
    """``action()``, again after one of ``errors`` up to ``retries`` times, after 1, 2, 4, 8, 8 .. s and up to 1 s more.

    ``counted`` is called before each repetition; none begins later than ``seconds`` after the first try. The last error
    is raised as it is.
    """
    if not retries:
        return action()
    try:
        from tenacity import (
            Retrying,
            retry_if_exception_type,
            sleep_using_event,
            stop_after_attempt,
            stop_before_delay,
            stop_when_event_set,
            wait_exponential,
            wait_random,
        )
    except ImportError as missing:
        raise ImportError("retries= needs tenacity: pip install 'kvdata[train]'") from missing

    def before(_state: Any) -> None:
        counted()

    ended = _ended.get() or threading.Event()
    stop = stop_after_attempt(retries + 1) | stop_when_event_set(ended)
    policy = Retrying(
        retry=retry_if_exception_type(errors),
        stop=stop if seconds is None else stop | stop_before_delay(seconds),
        wait=wait_exponential(_FIRST_WAIT, _LONGEST_WAIT) + wait_random(0, _JITTER),
        sleep=sleep_using_event(ended),
        before_sleep=before,
        reraise=True,
    )
    return policy(action)
