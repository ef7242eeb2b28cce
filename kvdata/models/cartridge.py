"""A cartridge: a short cache that is learned, slot by slot, to stand for one long document.

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``S`` slots, ``F`` sinks (frozen slots), ``D = H * head_dim``.

After Cartridges (arXiv 2506.06266): the slots' keys and values are the only weights, and they are trained so that the
model answers with them as with the full cache (`kvdata.models.distillation.top_k_kl`). The recipe is
``training/cartridge.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvdata.edits.address import source_digest
from kvdata.edits.selection import split_heads
from kvdata.errors import GeometryMismatch, InvalidRequest, OtherSource
from kvdata.models.files import SavedModule


class Cartridge(SavedModule):
    """S learned slots ``[2, L, S, D]`` for one document, in float32.

    What is learned is the distance from the slots' first content, in units of the deviation of each layer's and head's
    keys and values: one learning rate then fits all heads, and weight decay pulls towards the start, not to zero.
    The first slots never change: they are attention sinks, whatever the document says.

    Args:
        num_layers, num_kv_heads, head_dim: geometry of the cache.
        slots: their number S; a whole number of the server's chunks, if they are to be stored.
        sinks: how many first slots stay as they are.
    """

    kind: ClassVar[str] = "cartridge"
    version: ClassVar[int] = 1

    start: Tensor
    scale: Tensor

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, slots: int, sinks: int = 4) -> None:
        super().__init__()
        if not 0 <= sinks < slots:
            raise InvalidRequest(f"{slots} slots with {sinks} sinks among them leave nothing to learn")
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.slots, self.sinks = slots, sinks
        self.source, self.source_tokens = "", 0
        learned = (num_layers, slots - sinks, num_kv_heads * head_dim)
        self.keys = nn.Parameter(torch.zeros(learned))
        self.values = nn.Parameter(torch.zeros(learned))
        self.register_buffer("start", torch.zeros(2, num_layers, slots, learned[2]))
        self.register_buffer("scale", torch.ones(2, num_layers, 1, learned[2]))

    @torch.no_grad()
    def begin(self, kv: Tensor, source_tokens: Sequence[int]) -> None:
        """Take a compressed cache ``[2, L, S, D]`` as the slots' content, and forget what was learned.

        Args:
            kv: keys at positions ``0 .. S-1``, as `kvdata.edits.policies.apply_policy` returns them.
            source_tokens: all token ids of the document.

        Raises:
            GeometryMismatch: the compressed cache has another shape.
        """
        if kv.shape != self.start.shape:
            raise GeometryMismatch(f"the slots are {tuple(self.start.shape)}, the cache is {tuple(kv.shape)}")
        self.start.copy_(kv)
        by_head = split_heads(self.start, self.num_kv_heads)
        deviation = by_head.std(dim=(2, 4), keepdim=True).clamp_min(1e-6)  # of each K/V, layer and head
        self.scale.copy_(deviation.expand(-1, -1, -1, -1, self.head_dim).flatten(-2))
        self.keys.zero_()
        self.values.zero_()
        self.source, self.source_tokens = source_digest(source_tokens), len(source_tokens)

    def forward(self) -> Tensor:
        """The slots ``[2, L, S, D]``, float32."""
        learned = torch.stack((self.keys, self.values)) * self.scale
        slots: Tensor = self.start + nn.functional.pad(learned, (0, 0, self.sinks, 0))
        return slots

    @torch.no_grad()
    def slots_as(self, dtype: torch.dtype) -> Tensor:
        """The slots ``[2, L, S, D]`` on the CPU in a cache's dtype, to be stored."""
        slots: Tensor = self().to("cpu", dtype)
        return slots

    def check(self, source_tokens: Sequence[int]) -> None:
        """Refuse another document.

        Raises:
            OtherSource: these are not the tokens that the slots were trained on.
        """
        found = source_digest(source_tokens)
        if found != self.source:
            raise OtherSource(
                f"the cartridge stands for the document {self.source or '(none yet)'}, not for the "
                f"{len(source_tokens)} tokens with digest {found}; train one for this document"
            )

    def get_extra_state(self) -> dict[str, Any]:
        """The document's digest and length, for `state_dict`."""
        return {"source": self.source, "source_tokens": self.source_tokens}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.source, self.source_tokens = state["source"], state["source_tokens"]

    def geometry(self) -> dict[str, Any]:
        """Arguments of the constructor, as plain values."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "slots": self.slots,
            "sinks": self.sinks,
        }
