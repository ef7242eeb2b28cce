"""One cache that is to be compressed, and what a policy may know besides: worked out when the first policy asks.

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``Hq`` query heads, ``T`` tokens, ``N`` continuation tokens,
``D = H * head_dim``, ``B`` batch, ``V`` vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from kvdata.edits.policies import Sees, Source
from kvdata.layout import KVLayout

_INPUTS: dict[Sees, tuple[str, ...]] = {
    Sees.CACHE: (),
    Sees.QUERIES: ("queries",),
    Sees.QUESTION: ("queries", "question"),
    Sees.FUTURE: ("target",),
}


class Engine(Protocol):
    """The model; `kvdata.engines.huggingface.HuggingFaceEngine` is one."""

    layout: KVLayout

    @property
    def config(self) -> dict[str, Any]: ...

    def prefill(self, tokens: Sequence[int]) -> Tensor: ...

    def continue_from(self, kv: Tensor, continuation: Tensor, start_position: int | None = None) -> Tensor: ...

    def attention(
        self,
        kv: Tensor,
        continuation: Tensor,
        start_position: int | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor: ...

    def attention_inputs(self, kv: Tensor, continuation: Tensor) -> Any: ...

    def queries(self, tokens: Tensor, kv: Tensor | None = None) -> Tensor: ...


class Subject:
    """A full cache with its tokens, and the inputs that policies declare in `Sees`.

    Args:
        kv: ``[2, L, T, D]``.
        tokens: ``[T]`` int64.
        future: ``[N]``, what really follows; its attention is what an oracle sees.
        question: what a policy that sees the question is shown.

    Attributes:
        seconds: spent on each input so far.
    """

    def __init__(self, engine: Engine, kv: Tensor, tokens: Tensor, future: Tensor, question: Tensor) -> None:
        self.engine, self.kv, self.tokens, self.future = engine, kv, tokens, future
        self._question = question
        self.ids: list[int] = tokens.tolist()
        self.seconds: dict[str, float] = {}

    def source(self, sees: Sees) -> Source:
        """What a method that declares `sees` is given."""
        return Source(
            tokens=self.ids,
            queries=self._queries if "queries" in _INPUTS[sees] else None,
            question=self._asked if "question" in _INPUTS[sees] else None,
            target=self._target if "target" in _INPUTS[sees] else None,
        )

    def inputs_seconds(self, sees: Sees) -> float:
        """Time of the model passes behind `source`; they are made once for all methods."""
        return sum(self.seconds.get(name, 0.0) for name in _INPUTS[sees])

    @cached_property
    def _queries(self) -> Tensor:
        return self._timed("queries", lambda: self.engine.queries(self.tokens))

    @cached_property
    def _asked(self) -> Tensor:
        return self._timed("question", lambda: self.engine.queries(self._question, self.kv))

    @cached_property
    def _target(self) -> Tensor:
        from kvdata.engines.huggingface import attention_target  # needs transformers, as every engine so far

        heads = self.engine.layout.num_kv_heads

        def peak(attention: Tensor) -> Tensor:
            return attention_target(attention, heads)

        return self._timed("target", lambda: self.engine.attention(self.kv, self.future, reduce=peak))

    def _timed(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        started = time.perf_counter()
        with torch.inference_mode():
            found = compute()
        self.seconds[name] = time.perf_counter() - started
        return found
