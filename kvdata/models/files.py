"""Files of trained modules: tensors and plain values, so that reading one runs no code of whoever wrote it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvdata.errors import InvalidRequest

CHECKPOINT_KEY = "kvdata_module"
"""Where a recipe's checkpoint carries the same content as a module's own file."""


def save_module(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write ``{"kind", "version", "config", "state"}`` to a file."""
    torch.save(dict(content), path)


def load_module(path: str | Path, kind: str, version: int) -> dict[str, Any]:
    """The content of a file of `save_module`, or of a Lightning checkpoint that carries it; tensors on the CPU.

    Raises:
        InvalidRequest: not such a file, or one of another kind or version.
    """
    try:
        data: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as exc:
        raise InvalidRequest(f"{path} is no file of a trained module: {exc}") from exc
    if isinstance(data, Mapping):
        data = data.get(CHECKPOINT_KEY, data)
    found = (data.get("kind"), data.get("version")) if isinstance(data, Mapping) else (None, None)
    if found != (kind, version):
        raise InvalidRequest(f"{path} is not a {kind} of version {version}; train and save it again")
    return dict(data)
