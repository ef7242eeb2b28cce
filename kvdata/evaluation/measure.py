"""Measuring caches of one window against its full cache.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``D = num_kv_heads * head_dim``, ``B`` caches, ``N`` continuation tokens,
``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvdata.edits.rope import Rope
from kvdata.evaluation.attention import AttentionError
from kvdata.evaluation.continuations import NEXT, Continuation
from kvdata.evaluation.metrics import kl_divergence, next_token_nll, scored, top1_agreement
from kvdata.evaluation.runs import Row
from kvdata.evaluation.subject import Engine
from kvdata.evaluation.writing import Stored, about_full

Measures = dict[str, Any]  # nll, kl and top1, each by kind of continuation


class Reference:
    """What the model makes of a window's continuations after the full cache ``[2, L, T, D]``."""

    def __init__(self, engine: Engine, kv: Tensor, parts: Sequence[Continuation], rope: Rope) -> None:
        self.engine, self.kv, self.parts = engine, kv, parts
        self._logits = {part.kind: engine.continue_from(kv[None], part.ids[None]).float() for part in parts}
        following = next(part.ids for part in parts if part.kind == NEXT)
        self._attention = AttentionError(kv, engine.attention_inputs(kv, following), rope)

    def row(self, window: int, read_seconds: float) -> Row:
        """Of the full cache itself."""
        (measures,) = self._measures({part.kind: self._logits[part.kind] for part in self.parts}, 1)
        about = about_full(window, self.kv.shape[2])
        seconds = {"read": read_seconds}
        return Row(**about, stored_bytes=_bytes(self.kv), attention_error=0.0, seconds=seconds, **measures)

    def rows(self, window: int, caches: Sequence[Stored], stacked: Tensor) -> list[Row]:
        """Of compressed caches of one size, measured together: `stacked` is all of them, ``[B, 2, L, K, D]``."""
        logits = {
            part.kind: self.engine.continue_from(stacked, part.ids.expand(len(caches), -1)) for part in self.parts
        }
        return [
            Row(
                **cache.job.about(window, cache.kv),
                stored_bytes=_bytes(cache.kv),
                attention_error=self._attention(cache.kv),
                seconds=cache.seconds,
                **measures,
            )
            for cache, measures in zip(caches, self._measures(logits, len(caches)), strict=True)
        ]

    def _measures(self, logits: dict[str, Tensor], rows: int) -> list[Measures]:
        """``nll``, ``kl`` and ``top1`` by kind of each of `rows` caches, from ``[B, N, V]`` by kind."""
        found: list[Measures] = [{"nll": {}, "kl": {}, "top1": {}} for _ in range(rows)]
        for part in self.parts:
            for row, own in zip(found, logits[part.kind], strict=True):  # one at a time: N x V is large in float32
                given, ids = scored(own[None].float(), part.ids[None], part.cue)
                reference, _ = scored(self._logits[part.kind], part.ids[None], part.cue)
                row["nll"][part.kind] = float(next_token_nll(given, ids))
                row["kl"][part.kind] = float(kl_divergence(reference, given))
                row["top1"][part.kind] = float(top1_agreement(reference, given))
        return found


def _bytes(kv: Tensor) -> int:
    return kv.numel() * kv.element_size()
