"""Offline evaluation of dropping policies from caches that a server holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from kvdata.datasets import KVBatch, KVCacheDataset, collate
from kvdata.edits.policies import Sees
from kvdata.evaluation.metrics import kl_divergence, mean_interval, next_token_nll, top1_agreement


class Engine(Protocol):
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


@dataclass(frozen=True)
class Result:
    """One row of a report. ``nll`` and ``kl`` in nats per token; ``ci90`` is of ``delta_nll``, paired by window."""

    policy: str
    keep: float
    nll: float
    delta_nll: float
    ci90: tuple[float, float]
    kl: float
    top1: float
    kept_tokens: int
    stored_bytes: int
    trained: bool
    sees: Sees

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "ci90": list(self.ci90), "sees": self.sees.value}


@dataclass
class _Sums:
    nll: list[float] = field(default_factory=list)
    delta: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    kept_tokens: int = 0
    stored_bytes: int = 0

    def add(self, batch: KVBatch, logits: Tensor, reference: Tensor) -> None:
        nll = next_token_nll(logits, batch.continuation)
        self.nll += nll.tolist()
        self.delta += (nll - next_token_nll(reference, batch.continuation)).tolist()
        self.kl += kl_divergence(reference, logits).tolist()
        self.top1 += top1_agreement(reference, logits).tolist()
        self.kept_tokens = int(batch.lengths[0])
        self.stored_bytes += batch.kv.numel() * batch.kv.element_size()


def evaluate_caches(
    engine: Engine,
    caches: Sequence[PolicyCaches],
    batch_size: int = 4,
    progress: Callable[[Iterable[Any], int], Iterator[Any]] | None = None,
) -> list[Result]:
    """Read every policy's caches back from the server and measure the continuation decoded from them.

    Args:
        engine: continues from a cache, positions compact.
        caches: the first is the full cache, the reference; all datasets hold the same windows in one order, and
            within one dataset all caches and continuations have one length.
        batch_size: windows at a time.
        progress: wraps the iteration over batches (``rich.progress.track`` fits with its arguments bound).
    """
    loaders = [DataLoader(c.dataset, batch_size=batch_size, collate_fn=collate) for c in caches]
    sums = [_Sums() for _ in caches]
    batches: Iterable[tuple[KVBatch, ...]] = zip(*loaders, strict=True)
    if progress is not None:
        batches = progress(batches, len(loaders[0]))
    for row in batches:
        reference: Tensor | None = None
        for batch, total in zip(row, sums, strict=True):
            if not torch.equal(batch.continuation, row[0].continuation):
                raise ValueError("the datasets do not hold the same windows in the same order")
            logits = engine.continue_from(batch.kv, batch.continuation)
            reference = logits if reference is None else reference
            total.add(batch, logits, reference)
    return [_result(c, total) for c, total in zip(caches, sums, strict=True)]


def _result(caches: PolicyCaches, total: _Sums) -> Result:
    count = len(total.nll)
    return Result(
        policy=caches.policy,
        keep=caches.keep,
        nll=sum(total.nll) / count,
        delta_nll=sum(total.delta) / count,
        ci90=mean_interval(total.delta),
        kl=sum(total.kl) / count,
        top1=sum(total.top1) / count,
        kept_tokens=total.kept_tokens,
        stored_bytes=total.stored_bytes,
        trained=caches.trained,
        sees=caches.sees,
    )
