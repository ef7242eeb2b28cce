"""From a lookup to one ``[2, L, T, D]`` tensor: the only place where cached KV is copied out of a server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from kvdata.client.rpc import Deadline
from kvdata.client.session import Session
from kvdata.client.transfer import reading
from kvdata.errors import GeometryMismatch
from kvdata.layout import KVLayout

Layers = Sequence[int] | slice | None


@dataclass
class Lease:
    """A hit: its length in tokens and its chunks (flat tensors), read-locked until `close`."""

    hit: int
    chunks: list[torch.Tensor]
    layout: KVLayout
    _locks: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Release the server's locks; the chunks are invalid from here on."""
        self._locks.close()


def open_lease(session: Session, ids: Sequence[int], salt: str, deadline: Deadline) -> Lease:
    """Look ``ids`` up and lock what is there; an empty lease on a miss."""
    with ExitStack() as locks:
        request = locks.enter_context(session.sequence(ids, salt))
        hit = session.lookup(request, deadline) if request.chunks else 0
        chunks = locks.enter_context(reading(session, request, hit, deadline)) if hit else []
        return Lease(hit * session.chunk_size, chunks, session.layout, locks.pop_all())


def readable_chunks(session: Session, ids: Sequence[int], salt: str, deadline: Deadline) -> int:
    """How many leading chunks of ``ids`` the server holds; no lock is kept."""
    with session.sequence(ids, salt) as request:
        hit = session.lookup(request, deadline) if request.chunks else 0
        session.release(request, hit)
        return hit


def gather(chunks: list[torch.Tensor], layout: KVLayout, layers: Layers, out: torch.Tensor | None) -> torch.Tensor:
    """Copy stored chunks into one ``[2, L', hit, D]`` tensor: each byte is moved once."""
    index = range(layout.num_layers)[layers] if isinstance(layers, slice) else layers
    numbers = None if index is None else _layer_numbers(index, layout)
    count = layout.num_layers if numbers is None else len(numbers)
    per_token = layout.token_bytes // layout.dtype.itemsize
    tokens = sum(chunk.numel() for chunk in chunks) // per_token
    if out is None:
        out = torch.empty((2, count, tokens, layout.hidden), dtype=layout.dtype)
    elif (
        out.ndim != 4
        or out.shape[:2] != (2, count)
        or out.shape[2] < tokens
        or out.shape[3] != layout.hidden
        or out.device.type != "cpu"
    ):
        raise GeometryMismatch(
            f"out has shape {tuple(out.shape)} on {out.device}, this hit needs "
            f"[2, {count}, {tokens}, {layout.hidden}] on the CPU"
        )
    start = 0
    for chunk in chunks:
        target = out[:, :, start : start + chunk.numel() // per_token]
        if numbers is None:
            layout.decode(chunk, target)
        else:
            for row, layer in enumerate(numbers):
                layout.decode(chunk, target[:, row : row + 1], layer)
        start += target.shape[2]
    return out[:, :, :tokens]


def _layer_numbers(index: Sequence[int], layout: KVLayout) -> list[int]:
    try:
        return [range(layout.num_layers)[layer] for layer in index]
    except IndexError as exc:
        raise GeometryMismatch(f"layers {list(index)} do not exist in a model of {layout.num_layers} layers") from exc
