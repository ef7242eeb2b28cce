"""Learned token dropping: train a scorer on live caches, then compress caches with any policy.

Axes: ``B`` batch, ``2`` K/V, ``L`` layers, ``H`` KV heads, ``T`` prefix tokens, ``D = H * head_dim``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from blake3 import blake3
from torch import Tensor

from kvdata.datasets import KVBatch
from kvdata.edits.policies import Policy, Source, apply_policy
from kvdata.edits.rope import Rope
from kvdata.engines.huggingface import HuggingFaceEngine, attention_target
from kvdata.lightning import CacheWrite
from kvdata.models.losses import scorer_loss
from kvdata.models.token_scorer import TokenScorer


class Teacher:
    """What the continuation really attends to, computed from the cached KV: no prefix is computed again.

    Targets are kept, by dataset index: an epoch after the first costs no model at all.
    """

    def __init__(self, engine: HuggingFaceEngine) -> None:
        self.engine = engine
        self._known: dict[int, Tensor] = {}

    def __call__(self, batch: KVBatch) -> Tensor:
        """Attention targets ``[B, L, H, T]``: maximum over the later queries, mean over each head's query group."""
        indices = batch.index.tolist()
        if any(i not in self._known for i in indices):
            heads = self.engine.layout.num_kv_heads
            found = self.engine.attention(
                batch.kv, batch.continuation, reduce=lambda weights: attention_target(weights, heads)
            )
            self._known.update(zip(indices, found.half(), strict=True))
        return torch.stack([self._known[i] for i in indices]).float()


class TokenDropping(L.LightningModule):
    """Trains a `TokenScorer` to predict which cached tokens later queries attend to.

    Args:
        scorer: the model.
        teacher: computes the targets; not part of the checkpoint.
        learning_rate, weight_decay: of AdamW; cosine decay to zero over the run.
    """

    def __init__(
        self, scorer: TokenScorer, teacher: Teacher, learning_rate: float = 2e-3, weight_decay: float = 0.01
    ) -> None:
        super().__init__()
        self.scorer = scorer
        self.teacher = teacher  # a plain object, so its model's weights stay out of checkpoints
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay

    def training_step(self, batch: KVBatch, batch_index: int) -> Tensor:
        loss = scorer_loss(self.scorer(batch.kv), self.teacher(batch))
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch))
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.scorer.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CompressCaches(L.LightningModule):
    """Applies every policy at every budget to each cache of a batch; ``predict`` puts out `CacheWrite`s.

    Args:
        policies: each with the revision that goes into its salt.
        keeps: budgets in tokens.
        rope: rotates kept keys to their new positions.
        teacher: targets for an oracle policy; None when there is none.
    """

    def __init__(
        self,
        policies: Sequence[tuple[Policy, str]],
        keeps: Sequence[int],
        rope: Rope,
        num_kv_heads: int,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__()
        self.policies, self.keeps, self.rope, self.num_kv_heads = policies, keeps, rope, num_kv_heads
        self.teacher = teacher

    def predict_step(self, batch: KVBatch, batch_index: int) -> list[CacheWrite]:
        targets = self.teacher(batch) if self.teacher is not None else None
        writes = []
        for row, kv in enumerate(batch.kv):
            tokens, index = batch.tokens[row].tolist(), int(batch.index[row])
            source = Source(tokens=tokens, index=index, target=None if targets is None else targets[row])
            for policy, revision in self.policies:
                for keep in self.keeps:
                    smaller, _ = apply_policy(policy, kv, keep, self.rope, self.num_kv_heads, source)
                    meta = {"index": index, **batch.meta[row]}
                    writes.append(CacheWrite(smaller, tokens, policy.name, revision, meta=meta))
        return writes


def weights_revision(scorer: TokenScorer) -> str:
    """A revision that changes with the weights, so that two trainings never share an address."""
    digest = blake3()
    for tensor in scorer.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return f"w{digest.hexdigest(4)}"
