"""Linear codes of keys and values: the best basis under an error metric, and how many bits each coordinate gets.

Axes: ``...`` any (K/V and layers), ``D`` dims of a key or value, all heads of a layer together, ``R <= D`` latent
coordinates, most important first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvdata.edits.quantization import quantized_bytes
from kvdata.errors import InvalidRequest

PRECISIONS = (4, 8, 16)
GROUP = 64


class Basis(NamedTuple):
    """Row vectors ``x`` as latents ``z = (x - mean) @ analysis`` of unit variance, ``x = z @ synthesis + mean``.

    Attributes:
        analysis: ``[..., D, D]``, one column a coordinate.
        synthesis: ``[..., D, D]``, one row a coordinate.
        spectrum: ``[..., D]``, falling: the error, under the metric, of leaving a coordinate out.
    """

    analysis: Tensor
    synthesis: Tensor
    spectrum: Tensor


def whitened_basis(covariance: Tensor, metric: Tensor) -> Basis:
    """The basis whose first R coordinates have the least error ``e^T metric e``, for every R at once.

    With ``H = metric^(1/2)`` it is the eigenbasis of ``H covariance H`` (Eckart-Young in the whitened space).

    Args:
        covariance: ``[..., D, D]`` of the vectors.
        metric: ``[..., D, D]``, positive semidefinite. Directions that it does not see get a millionth of the
            strongest one's weight, so that full rank stays exact.
    """
    values, vectors = torch.linalg.eigh(metric.double())
    root = values.clamp_min(values[..., -1:] * 1e-6).clamp_min(1e-30).sqrt().unsqueeze(-2)
    half, inverse = (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT
    spectrum, axes = torch.linalg.eigh(half @ covariance.double() @ half)
    spectrum, axes = spectrum.flip(-1), axes.flip(-1)
    spectrum = spectrum.clamp_min(spectrum[..., :1] * 1e-9).clamp_min(1e-30)
    deviation = spectrum.sqrt().unsqueeze(-2)
    analysis, synthesis = half @ (axes / deviation), (axes * deviation).mT @ inverse
    return Basis(analysis.float(), synthesis.float(), spectrum.float())


def water_fill(spectrum: Tensor, budget: int, precisions: Sequence[int] = PRECISIONS, group: int = GROUP) -> Tensor:
    """Bits of each coordinate, int ``[..., D]``, so that a token's latents fit `budget` bytes at the least error.

    Reverse water-filling (Cover and Thomas, 10.3) over a few precisions: a coordinate gets the next precision
    where a bit of it buys more error than the common water level, which is found by bisection.

    Args:
        spectrum: ``[..., D]``, falling along D; all in one unit of error.
        budget: bytes per token for everything in `spectrum`, scales of integers included.
        precisions: allowed bits, of 4, 8 and 16; a coordinate that gets none is dropped.
        group: coordinates that share a scale (see `kvdata.edits.quantization`).

    Raises:
        InvalidRequest: unknown precisions, or a budget too small for anything.
    """
    if not precisions or not set(precisions) <= set(PRECISIONS):
        raise InvalidRequest(f"precisions must be some of {PRECISIONS}, got {tuple(precisions)}")
    ladder = [0, *sorted(precisions)]
    gains = [(_noise(low) - _noise(high)) / (high - low) for low, high in pairwise(ladder)]
    importance = spectrum.double().log2()
    low, high = float(importance.min()) - 64, float(importance.max()) + 1
    for _ in range(60):
        level = (low + high) / 2
        fits = latent_bytes(_bits(importance, level, ladder, gains), group) <= budget
        low, high = (low, level) if fits else (level, high)
    bits = _bits(importance, high, ladder, gains)
    if not bits.any():
        raise InvalidRequest(f"{budget} bytes per token are too few for any latent; give a larger ratio")
    return bits


def latent_bytes(bits: Tensor, group: int = GROUP) -> int:
    """Bytes of one token's latents, given the bits of each coordinate ``[..., R]``."""
    total = 0
    for row in bits.flatten(0, -2).tolist():
        total += 2 * row.count(16)
        total += sum(quantized_bytes(1, row.count(b), b, group) for b in (4, 8))
    return total


def _bits(importance: Tensor, level: float, ladder: Sequence[int], gains: Sequence[float]) -> Tensor:
    bits = torch.zeros(importance.shape, dtype=torch.int64)
    for precision, gain in zip(ladder[1:], gains, strict=True):
        bits[importance + math.log2(gain) >= level] = precision
    # int4 codes share bytes in pairs: an odd one out is dropped (it is the least of the coordinates kept).
    last = (bits > 0).sum(-1) - 1
    odd = ((bits == 4).sum(-1) % 2).bool()
    bits[odd] = bits[odd].scatter(-1, last[odd].unsqueeze(-1), 0)
    return bits


def _noise(bits: int) -> float:
    """Error variance of a coordinate of unit variance: a uniform step over 5 deviations; float16 has 11 bits."""
    if bits == 0:
        return 1.0
    step = 2.0**-11 if bits == 16 else 5 / (2**bits - 1)
    return step**2 / 12
