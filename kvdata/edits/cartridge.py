"""How an edit puts a trained cartridge in place of its document's cache; `kvdata.edits.functions.cartridge` makes it.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``S`` slots, ``D = H * head_dim``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvdata.edits.rope import Rope
from kvdata.errors import GeometryMismatch, InvalidRequest
from kvdata.models.cartridge import Cartridge


@dataclass(frozen=True)
class CartridgeMethod:
    """The learned slots of one document, under its first ids.

    `compress` raises `OtherSource` for another document, `GeometryMismatch` for another model's cache, and
    `InvalidRequest` when the slots are not a whole number of chunks.
    """

    cartridge: Cartridge
    name: str = "cartridge"

    def compress(
        self, kv: Tensor, tokens: list[int], kept: int, chunk_size: int, rope: Rope, num_kv_heads: int
    ) -> tuple[Tensor, list[int]]:
        self.cartridge.check(tokens)
        slots = self.cartridge.slots_as(kv.dtype)
        if (*slots.shape[:2], slots.shape[3]) != (*kv.shape[:2], kv.shape[3]):
            raise GeometryMismatch(f"the cartridge is {tuple(slots.shape)}, of another model than kv {tuple(kv.shape)}")
        if kept != slots.shape[2]:
            raise InvalidRequest(
                f"the cartridge's {slots.shape[2]} slots are not a whole number of chunks of {chunk_size} tokens; "
                "train one whose slots are"
            )
        return slots, tokens[:kept]
