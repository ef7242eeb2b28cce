"""Learned token dropping: train a scorer on live caches, then compress caches with any policy.

Axes: ``B`` batch, ``2`` K/V, ``L`` layers, ``H`` KV heads, ``T`` prefix tokens, ``D = H * head_dim``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from kvdata.datasets import KVBatch
from kvdata.edits.policies import Policy, Source, apply_policy
from kvdata.edits.rope import Rope
from kvdata.engines.huggingface import HuggingFaceEngine, attention_target
from kvdata.lightning import CacheWrite
from kvdata.models.losses import sample_tokens, scorer_loss
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

    Each step scores a random sample of a batch's tokens: a cheaper step buys more of them. Use it with
    ``Trainer(gradient_clip_val=1.0)`` and small batches.

    Args:
        scorer: the model.
        teacher: computes the targets; not part of the checkpoint.
        learning_rate, weight_decay: of AdamW; linear warm-up, then cosine decay to zero over the run.
        warmup_steps: steps of the warm-up.
        sampled_tokens: tokens scored per step.
    """

    def __init__(
        self,
        scorer: TokenScorer,
        teacher: Teacher,
        learning_rate: float = 4e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 20,
        sampled_tokens: int = 128,
    ) -> None:
        super().__init__()
        self.scorer = scorer
        self.teacher = teacher  # a plain object, so its model's weights stay out of checkpoints
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps, self.sampled_tokens = warmup_steps, sampled_tokens

    def training_step(self, batch: KVBatch, batch_index: int) -> Tensor:
        target = self.teacher(batch)
        chosen = sample_tokens(batch.kv.shape[3], self.sampled_tokens)
        # The sample already leaves out the sinks and the window, which are kept whatever their score.
        loss = scorer_loss(self.scorer(batch.kv, chosen), target[..., chosen], sinks=0, window=0)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch))
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(
            self.scorer.parameters(), self.learning_rate, betas=(0.9, 0.98), weight_decay=self.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        total = max(1, int(self.trainer.estimated_stepping_batches) - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - self.warmup_steps) / total)))


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
                    meta = {**batch.meta[row], "index": index}
                    writes.append(CacheWrite(smaller, tokens, policy.name, revision, meta=meta))
        return writes
