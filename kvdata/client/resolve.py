"""Which geometry a model's cache has: what a server publishes, what the user says, what is known from before."""

from __future__ import annotations

import difflib

from kvdata.client.connection import Connection
from kvdata.client.discovery import ServerInfo, published_layout
from kvdata.errors import ModelNotRegistered
from kvdata.layout import KVLayout


def resolve(info: ServerInfo, connection: Connection, known: KVLayout | None) -> tuple[KVLayout, bool]:
    """The model's layout, and whether a serving engine has it registered."""
    name = connection.model_name
    if name in info.engines:
        return published_layout(info.engines[name], connection), True
    layout = connection.layout or info.layouts.get(name) or known
    if layout is not None:
        return layout, False
    names = info.model_names()
    if name in names:
        raise ModelNotRegistered(
            f"{name!r} was registered by a client that publishes no geometry; pass layout=KVLayout(...)"
        )
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    engines = sorted(info.engines)
    if close:
        hint = f"; did you mean {close[0]!r}?"
    elif len(engines) == 1:  # an engine registers the model's folder or id, whatever name it serves it under
        hint = f". The only engine's is {engines[0]!r}; vLLM's --served-model-name is not known here."
    else:
        hint = "."
    raise ModelNotRegistered(
        f"{name!r} is not registered at {connection.http_url} (registered: {', '.join(names) or 'none'}){hint} "
        "Use the name the engine was started with, or pass layout=KVLayout(...) when no engine runs"
    )
