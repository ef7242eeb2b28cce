"""Which part of a cached prefix is wanted.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``H`` KV heads, ``S`` head size, ``D = H * S``; primes mark the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvdata.errors import GeometryMismatch, InvalidRequest
from kvdata.layout import KVLayout

Index: TypeAlias = Sequence[int] | slice | None

_KINDS = {("k", "v"): slice(0, 2), ("k",): slice(0, 1), ("v",): slice(1, 2)}


@dataclass(frozen=True)
class Selection:
    """The part of a prefix's cache that is copied: ``[2', L', T', D']``; everything by default.

    Args:
        layers: layer indices or a slice.
        heads: KV head indices or a slice; ``D'`` is theirs, in this order.
        window: slice of the cached prefix's tokens, e.g. ``slice(-128, None)`` for its end.
        kinds: ``("k", "v")``, ``("k",)`` or ``("v",)``: the first axis.
    """

    layers: Index = None
    heads: Index = None
    window: slice | None = None
    kinds: Sequence[str] = ("k", "v")

    def __post_init__(self) -> None:
        if tuple(self.kinds) not in _KINDS:
            raise InvalidRequest(f"kinds must be ('k', 'v'), ('k',) or ('v',), got {self.kinds!r}")
        if self.window is not None and self.window.step not in (None, 1):
            raise InvalidRequest(f"window must be a slice without a step, got {self.window!r}")

    def kind_slice(self) -> slice:
        """K, V or both, on the first axis."""
        return _KINDS[tuple(self.kinds)]

    def tokens(self, hit: int) -> range:
        """Positions that are wanted of a hit of so many tokens."""
        return range(hit)[self.window or slice(None)]

    def layer_numbers(self, layout: KVLayout) -> Sequence[int]:
        """Every wanted layer."""
        return _numbers(self.layers, layout.num_layers, "layers")

    def head_numbers(self, layout: KVLayout) -> Sequence[int]:
        """Every wanted KV head."""
        return _numbers(self.heads, layout.num_kv_heads, "heads")

    def shape(self, layout: KVLayout, hit: int) -> tuple[int, int, int, int]:
        """``(2', L', T', D')`` of a hit of so many tokens."""
        hidden = len(self.head_numbers(layout)) * layout.head_dim
        return len(self.kinds), len(self.layer_numbers(layout)), len(self.tokens(hit)), hidden


WHOLE = Selection()


def runs(numbers: Sequence[int], part: int) -> Iterator[tuple[int, slice, slice]]:
    """Consecutive numbers together, cut at multiples of ``part``.

    Yields ``(number of the part, slice inside that part, slice of the result)``.
    """
    start = 0
    for place in range(1, len(numbers) + 1):
        previous = numbers[place - 1]
        if place == len(numbers) or numbers[place] != previous + 1 or numbers[place] % part == 0:
            which, first = divmod(numbers[start], part)
            yield which, slice(first, first + place - start), slice(start, place)
            start = place


def _numbers(index: Index, count: int, name: str) -> Sequence[int]:
    if index is None:
        return range(count)
    if isinstance(index, slice):
        return range(count)[index]
    try:
        return [range(count)[number] for number in index]
    except IndexError as exc:
        raise GeometryMismatch(f"{name} {list(index)} do not exist in a model with {count}") from exc
