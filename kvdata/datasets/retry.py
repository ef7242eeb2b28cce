"""Trying again what may go better a moment later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvdata.errors import ServerTimeout, ServerUnreachable

T = TypeVar("T")

TRANSIENT = (ServerUnreachable, ServerTimeout)
_LONGEST_WAIT = 30.0


def with_retries(action: Callable[[], T], retries: int, counted: Callable[[], object]) -> T:
    """``action()``, again after a `TRANSIENT` error up to ``retries`` times: after about 1, 2, 4 .. 30 s at random.

    ``counted`` is called before each repetition. The last error is raised as it is.
    """
    if not retries:
        return action()
    try:
        from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential
    except ImportError as missing:
        raise ImportError("retries= needs tenacity: pip install 'kvdata[train]'") from missing

    def before(_state: Any) -> None:
        counted()

    policy = Retrying(
        retry=retry_if_exception_type(TRANSIENT),
        stop=stop_after_attempt(retries + 1),
        wait=wait_random_exponential(multiplier=1, max=_LONGEST_WAIT),
        before_sleep=before,
        reraise=True,
    )
    return policy(action)
