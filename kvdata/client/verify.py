"""Which packing does a cache really have? Compare what the server holds with a forward of the model.

Two engines publish one format name for different byte orders, so that a wrong reading gives tensors of the right
shape and wrong values. Only the model can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvdata.client.connection import Connection
from kvdata.client.packings import remember_packing
from kvdata.errors import GeometryMismatch, InvalidRequest, MissingKV, UnsupportedLayout
from kvdata.layout import PACKINGS, KVLayout

# bfloat16 noise over 30 layers is about 1 % for K and 2 % for V; a wrong byte order is off by more than 100 %.
K_TOLERANCE, V_TOLERANCE = 0.05, 0.10


class Model(Protocol):
    """Computes a cache; `kvdata.engines.huggingface.HuggingFaceEngine` does."""

    @property
    def layout(self) -> KVLayout: ...

    def prefill(self, tokens: Sequence[int]) -> Tensor: ...


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        packing: the packing that fits, or None.
        errors: for each packing tried, the largest relative error of a layer's K and V.
        tokens: how many tokens were compared.
    """

    packing: str | None
    errors: dict[str, tuple[float, float]]
    tokens: int

    def __str__(self) -> str:
        tried = "; ".join(f"{name}: K {k:.1%}, V {v:.1%}" for name, (k, v) in self.errors.items())
        verdict = f"packing {self.packing} fits" if self.packing else "no known packing fits"
        return f"{verdict} ({self.tokens} tokens; relative error by packing: {tried})"


def verify(connection: Connection, model: Model, tokens: Sequence[int], cache_salt: str = "") -> Verification:
    """Read ``tokens`` in every packing that the cache could have, and compare each with the model's own KV.

    A packing that fits is remembered for this server and model: ``packing="auto"`` takes it from then on. When none
    fits, what was remembered is forgotten.

    Raises:
        MissingKV: nothing of ``tokens`` is cached.
        UnsupportedLayout: the cache cannot be read at all, or its geometry is not the model's.
    """
    computed: Tensor | None = None
    errors: dict[str, tuple[float, float]] = {}
    refusals: list[str] = []
    for packing in PACKINGS:
        try:
            found = _read(connection, model.layout, packing, tokens, cache_salt)
        except (InvalidRequest, UnsupportedLayout) as exc:  # this server's cache cannot be in that packing
            refusals.append(f"{packing}: {exc}")
            continue
        if computed is None:
            computed = model.prefill([int(t) for t in tokens[: found.shape[2]]])
        errors[packing] = _relative_errors(found, computed)
    if computed is None:
        raise UnsupportedLayout(f"{connection.model_name} cannot be compared with the model: {'; '.join(refusals)}")
    fitting = [name for name, (k, v) in errors.items() if k < K_TOLERANCE and v < V_TOLERANCE]
    packing_found = fitting[0] if len(fitting) == 1 else None
    remember_packing(connection, packing_found)
    return Verification(packing_found, errors, computed.shape[2])


def _read(connection: Connection, layout: KVLayout, packing: str, tokens: Sequence[int], salt: str) -> Tensor:
    config = {"num_attention_heads": layout.num_kv_heads, "num_key_value_heads": layout.num_kv_heads}
    config["head_dim"] = layout.head_dim
    given = connection.layout
    if given is not None:
        given = given.with_packing(packing, given.block_size or 128)
    with replace(connection, packing=packing, layout=given, model_config=config).connect() as ctx:
        if ctx.layout.packing != packing:
            raise UnsupportedLayout(f"the cache is {ctx.layout.packing}")
        if (ctx.layout.num_layers, ctx.layout.hidden) != (layout.num_layers, layout.hidden):
            raise GeometryMismatch(f"the cache has {ctx.layout}, the model {layout}")
        kv = ctx.retrieve(tokens, salt)
    if kv is None:
        raise MissingKV(f"nothing of these {len(tokens)} tokens is cached on {connection.http_url}; choose others")
    return kv


def _relative_errors(found: Tensor, computed: Tensor) -> tuple[float, float]:
    difference = (found.float() - computed.float()).flatten(2)
    error = difference.norm(dim=2) / computed.float().flatten(2).norm(dim=2)  # [2, L]
    worst = torch.nan_to_num(error, nan=float("inf")).amax(dim=1)
    return float(worst[0]), float(worst[1])
