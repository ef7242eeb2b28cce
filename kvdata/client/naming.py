"""Every error of a call says which call it was, and of which server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvdata.client.connection import Connection
from kvdata.errors import ServerError, StoreFailed


@contextmanager
def named(operation: str, connection: Connection) -> Iterator[None]:
    """Around a call: what its error does not say yet of operation and server is added to it."""
    try:
        yield
    except (ServerError, StoreFailed) as exc:
        said = str(exc)
        told = said if operation in said else f"{operation}: {said}"
        if connection.url not in told and connection.http_url.rstrip("/") not in told:
            told += f" (server {connection.url})"
        if told == said:
            raise
        raise type(exc)(told) from exc
