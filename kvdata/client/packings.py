"""Packings that a `verify` has confirmed, remembered for each server and model in the user's cache folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvdata.client.connection import Connection


def _file() -> Path:
    root = os.environ.get("KVDATA_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvdata"
    return Path(root) / "packings.json"


def _known() -> dict[str, str]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(connection: Connection) -> str:
    return f"{connection.http_url.rstrip('/')} {connection.model_name}"


def recall_packing(connection: Connection) -> str | None:
    """The packing that was confirmed for this server and model, if any."""
    return _known().get(_key(connection))


def remember_packing(connection: Connection, packing: str | None) -> None:
    """Keep a confirmed packing for ``packing="auto"``; None forgets it."""
    known = _known()
    if packing is None:
        known.pop(_key(connection), None)
    else:
        known[_key(connection)] = packing
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(known, indent=1, sort_keys=True))
    part.replace(path)
