"""Evaluation of caches that are in a server already, such as a `KVCacheWriter` left there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from kvdata.datasets import KVBatch, KVCacheDataset, collate
from kvdata.datasets.ingest import Progress
from kvdata.edits.policies import Sees
from kvdata.evaluation.continuations import NEXT
from kvdata.evaluation.metrics import kl_divergence, next_token_nll, top1_agreement
from kvdata.evaluation.runs import FULL, Row


class Continues(Protocol):
    """Who continues from a cache; `kvdata.engines.huggingface.HuggingFaceEngine` does."""

    def continue_from(self, kv: Tensor, continuation: Tensor, start_position: int | None = None) -> Tensor: ...


@dataclass(frozen=True)
class PolicyCaches:
    """The caches that one policy made at one budget, as a dataset over the server that holds them.

    Attributes:
        policy: its name; ``"full"`` is the reference.
        keep: kept tokens / all tokens.
        dataset: one cache per window, every policy's in the same order, with the true continuations.
        trained, sees: what the policy is, so that tables can keep kinds apart.
    """

    policy: str
    keep: float
    dataset: KVCacheDataset
    trained: bool = False
    sees: Sees = Sees.CACHE


def evaluate_caches(
    engine: Continues, caches: Sequence[PolicyCaches], batch_size: int = 4, progress: Progress | None = None
) -> list[Row]:
    """Read every policy's caches back from the server and measure the continuation decoded from them.

    `kvdata.evaluation.summarise` makes results of the rows.

    Args:
        engine: continues from a cache, positions compact.
        caches: the first is the full cache, the reference (``"full"``, keep 1); all datasets hold the same windows in
            one order, and within one dataset all caches and continuations have one length.
        batch_size: windows at a time.
        progress: wraps the iteration over batches (``rich.progress.track`` fits with its arguments bound).
    """
    if (caches[0].policy, caches[0].keep) != (FULL, 1.0):
        raise ValueError("the first caches must be the full ones: PolicyCaches('full', 1.0, ...)")
    loaders = [DataLoader(c.dataset, batch_size=batch_size, collate_fn=collate) for c in caches]
    rows: list[Row] = []
    batches: Iterable[tuple[KVBatch, ...]] = zip(*loaders, strict=True)
    for row in progress(batches, len(loaders[0])) if progress else batches:
        reference: Tensor | None = None
        for batch, made in zip(row, caches, strict=True):
            if not torch.equal(batch.continuation, row[0].continuation):
                raise ValueError("the datasets do not hold the same windows in the same order")
            logits = engine.continue_from(batch.kv, batch.continuation)
            reference = logits if reference is None else reference
            rows += _rows(made, batch, logits, reference)
    return rows


def _rows(made: PolicyCaches, batch: KVBatch, logits: Tensor, reference: Tensor) -> list[Row]:
    nll = next_token_nll(logits, batch.continuation).tolist()
    kl = kl_divergence(reference, logits).tolist()
    top1 = top1_agreement(reference, logits).tolist()
    return [
        Row(
            window=int(batch.index[i]),
            policy=made.policy,
            revision="",
            keep=made.keep,
            kept_tokens=int(batch.lengths[i]),
            sees=made.sees.value,
            trained=made.trained,
            stored_bytes=batch.kv[i].numel() * batch.kv.element_size(),
            nll={NEXT: nll[i]},
            kl={NEXT: kl[i]},
            top1={NEXT: top1[i]},
        )
        for i in range(len(batch))
    ]
