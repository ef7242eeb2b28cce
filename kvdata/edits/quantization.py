"""Integers instead of floats: group-wise asymmetric int8 and int4, packed, with exact byte counts.

A group is `group` neighbours along the last axis; they share a scale and a minimum, both float16, 4 bytes:
``code = round((x - minimum) / scale)``, ``scale = (max - min) / (2**bits - 1)`` (as KIVI, arXiv 2402.02750).
Groups along another axis (over tokens, as KIVI does for keys): transpose first.

Axes: ``...`` any, ``C`` the axis in groups, ``G = ceil(C / group)`` groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvdata.errors import InvalidRequest

BITS = (4, 8)
GROUP_BYTES = 4  # scale and minimum, float16 each


@dataclass(frozen=True)
class Quantized:
    """A tensor as integers.

    Attributes:
        codes: uint8 ``[..., C * bits / 8]``; two int4 codes share a byte, the earlier one in the low half.
        scale, minimum: float16 ``[..., G]``.
        bits: 4 or 8.
        group: values that share a scale; the last group may be smaller.
        dtype: of the tensor that was quantised, and of what `dequantize` gives back.
    """

    codes: Tensor = field(repr=False)
    scale: Tensor = field(repr=False)
    minimum: Tensor = field(repr=False)
    bits: int
    group: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """What it takes to keep it: codes, scales and minima."""
        return sum(part.numel() * part.element_size() for part in (self.codes, self.scale, self.minimum))


def quantize(x: Tensor, bits: int, group: int) -> Quantized:
    """Any float tensor ``[..., C]`` as integers.

    An error is at most half a scale, plus what float16 rounds off the group's minimum and scale.

    Raises:
        InvalidRequest: bits other than 4 and 8, a group below 1, or an odd C with 4 bits.
    """
    _check(x.shape[-1], bits, group)
    codes, scale, minimum = _encode(x.float(), bits, group)
    packed = codes.flatten(-2)[..., : x.shape[-1]].to(torch.uint8)
    if bits == 4:
        packed = packed[..., ::2] | packed[..., 1::2] << 4
    return Quantized(packed, scale, minimum, bits, group, x.dtype)


def dequantize(quantized: Quantized) -> Tensor:
    """The tensor ``[..., C]`` again, in its old dtype."""
    codes = quantized.codes
    if quantized.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    grouped = _groups(codes, quantized.group)
    return _decode(grouped, quantized.scale, quantized.minimum, codes.shape[-1]).to(quantized.dtype)


def fake_quantize(x: Tensor, bits: int, group: int) -> Tensor:
    """What `quantize` and `dequantize` leave of a tensor, with the gradient of the identity (straight-through)."""
    _check(x.shape[-1], bits, group)
    with torch.no_grad():
        rounded = _decode(*_encode(x.float(), bits, group), x.shape[-1]).to(x.dtype)
    return x + (rounded - x).detach() if x.requires_grad else rounded


def quantized_bytes(count: int, width: int, bits: int, group: int) -> int:
    """Bytes of `count` rows of `width` values as integers: `Quantized.nbytes` without the tensor."""
    _check(width, bits, group)
    return count * (width * bits // 8 + GROUP_BYTES * -(-width // group))


def _encode(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as float ``[..., G, group]``, scale and minimum as they are kept, ``[..., G]``."""
    # The padding repeats the last value, so that it changes neither end of the last group.
    grouped = _groups(x, group)
    low, high = grouped.aminmax(dim=-1)
    minimum = low.half()
    # Measured against the *rounded* minimum and never zero, so that codes make up for what float16 lost.
    scale = ((high - minimum.float()) / (2**bits - 1)).clamp_min(1e-6).half()
    codes = ((grouped - minimum.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)).round()
    return codes.clamp(0, 2**bits - 1), scale, minimum


def _decode(codes: Tensor, scale: Tensor, minimum: Tensor, width: int) -> Tensor:
    values = codes.float() * scale.float().unsqueeze(-1) + minimum.float().unsqueeze(-1)
    return values.flatten(-2)[..., :width]


def _groups(x: Tensor, group: int) -> Tensor:
    """``[..., C]`` -> ``[..., G, group]``, padded with the last value."""
    missing = -x.shape[-1] % group
    if missing:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1)
    return x.reshape(*x.shape[:-1], -1, group)


def _check(width: int, bits: int, group: int) -> None:
    if bits not in BITS:
        raise InvalidRequest(f"bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    if group < 1:
        raise InvalidRequest(f"a group needs at least one value, got {group}")
    if bits == 4 and width % 2:
        raise InvalidRequest(f"int4 packs two values in a byte, but {width} is odd")
