"""What a server counts, from its Prometheus metrics."""

from __future__ import annotations

import re

from kvdata.client.discovery import Http
from kvdata.errors import ProtocolError

# Our names of the counters, and the server's.
_COUNTERS = {
    "stored_chunks": "lmcache_mp_l1_write_chunks_total",
    "retrieved_chunks": "lmcache_mp_l1_read_chunks_total",
}


def counters(http_url: str, timeout: float = 10.0) -> dict[str, int]:
    """Chunks written to and read from a server since it started: ``stored_chunks`` and ``retrieved_chunks``.

    A chunk counts as read whenever a read lock on it is released: after each retrieve, of an engine too, and after a
    lookup that nothing followed.

    Raises:
        ServerUnreachable, ServerTimeout: as `Http.request`.
        ProtocolError: the server has no metrics.
    """
    http = Http(http_url, timeout)
    try:
        answer = http.request("GET", "/metrics")
    finally:
        http.close()
    if answer.status_code != 200:
        raise ProtocolError(f"GET {http_url}/metrics answered {answer.status_code}; is this an LMCache server?")

    def total(name: str) -> int:
        return int(sum(float(v) for v in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)", answer.text, re.MULTILINE)))

    return {ours: total(theirs) for ours, theirs in _COUNTERS.items()}
