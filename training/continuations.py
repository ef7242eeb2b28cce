"""What a cartridge is trained on: texts that could follow a document, and how the model on its full cache reads them.

Axes: ``2`` K/V, ``L`` layers, ``T`` prefix tokens, ``D = H * head_dim``, ``M`` texts, ``N`` tokens of a text,
``k`` likeliest tokens.

Recall of the document's own text alone overfits. So the model writes the texts itself, from the full cache: how the
document may go on, and what it says when it is asked to sum up, explain or question what it has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdata.engines.huggingface import HuggingFaceEngine
from kvdata.engines.sampling import first_tokens, sample_continuations
from kvdata.models.distillation import top_k_of

OPENINGS = (
    "\n\nIn summary,",
    "\n\nQuestion about the text above:",
    "\n\nFor example,",
    "\n\nIn other words,",
    "\n\nNote that",
    "\n\nThe text above explains",
    "\n\nAnswer:",
    "\n\n>>> ",
)
"""How texts begin that do not simply go on."""

_BRANCHES = 64  # at a time: a step of few costs nearly as much, attention over all grows with their square
_READ_AT_A_TIME = 8


@dataclass(frozen=True)
class Texts:
    """Texts after one document, with the teacher's predictions.

    Attributes:
        ids: ``[M, N]``.
        log_probs, indices: ``[M, N, k]``, of the token after each, as `kvdata.models.distillation.top_k_of` gives them.
    """

    ids: Tensor
    log_probs: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Tensor | slice) -> Texts:
        return Texts(self.ids[rows], self.log_probs[rows], self.indices[rows])


def write_texts(
    engine: HuggingFaceEngine,
    kv: Tensor,
    tokens: Sequence[int],
    continuations: int,
    openings: Sequence[Sequence[int]],
    length: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Sampled from the model on the full cache: ``[continuations, length]``, and ``[len(openings), length]``.

    Args:
        kv: ``[2, L, T, D]``.
        tokens: its T ids.
        continuations: how many go on from the document's end.
        openings: token ids of the other texts' beginnings.
        length: tokens of each text.
    """
    starts = [*first_tokens(engine, kv, tokens[-1], continuations, generator), *map(torch.tensor, openings)]
    parts = [
        sample_continuations(engine, kv, starts[i : i + _BRANCHES], length, generator=generator)
        for i in range(0, len(starts), _BRANCHES)
    ]
    texts = torch.cat(parts)
    return texts[:continuations], texts[continuations:]


def read_texts(engine: HuggingFaceEngine, kv: Tensor, ids: Tensor, top_k: int) -> Texts:
    """What the model on the full cache ``[2, L, T, D]`` predicts along texts ``[M, N]``."""
    read = [
        top_k_of(engine.continue_from(kv.expand(len(part), *kv.shape), part), top_k)
        for part in ids.split(_READ_AT_A_TIME)
    ]
    return Texts(ids, *(torch.cat(parts).cpu().clone() for parts in zip(*read, strict=True)))
