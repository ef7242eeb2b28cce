"""What a server counts, from its Prometheus metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvdata.client.http import Http
from kvdata.errors import ProtocolError


@dataclass(frozen=True)
class Counters:
    """Counts since the server started.

    Attributes:
        stored_chunks: written.
        retrieved_chunks: read. A chunk counts whenever a read lock on it is released: after each retrieve, of an
            engine too, and after a lookup that nothing followed.
        requested_tokens, hit_tokens: of all lookups; None when the server does not count them.
    """

    stored_chunks: int
    retrieved_chunks: int
    requested_tokens: int | None
    hit_tokens: int | None


def read_counters(http: Http) -> Counters:
    """Ask a server for its counters.

    Raises:
        ServerUnreachable, ServerTimeout: as `Http.request`.
        ProtocolError: the server has no metrics.
    """
    answer = http.request("GET", "/metrics")
    if answer.status_code != 200:
        raise ProtocolError(f"GET {http.url}/metrics answered {answer.status_code}; is this an LMCache server?")
    text = answer.text
    return Counters(
        _total(text, "l1_write_chunks_total") or 0,  # a family without a count yet is not there
        _total(text, "l1_read_chunks_total") or 0,
        _total(text, "lookup_requested_tokens_total"),
        _total(text, "lookup_hit_tokens_total"),
    )


def counters(http_url: str, timeout: float = 10.0) -> dict[str, int]:
    """``stored_chunks`` and ``retrieved_chunks`` of a server, as in `Counters`; errors as `read_counters`."""
    http = Http(http_url, timeout)
    try:
        found = read_counters(http)
    finally:
        http.close()
    return {"stored_chunks": found.stored_chunks, "retrieved_chunks": found.retrieved_chunks}


def _total(text: str, name: str) -> int | None:
    """Sum over the labels of one family; None when the server has no such family."""
    values = re.findall(rf"^lmcache_mp_{name}(?:{{[^}}]*}})? (\S+)", text, re.MULTILINE)
    return int(sum(map(float, values))) if values else None
