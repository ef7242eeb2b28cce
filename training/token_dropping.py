"""Learned token dropping: train a scorer on live caches, then compress caches with any policy.

Axes: ``B`` batch, ``2`` K/V, ``L`` layers, ``H`` KV heads, ``T`` prefix tokens, ``C`` signals, ``D = H * head_dim``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import lightning as L
from torch import Tensor

from kvdata.datasets import KVBatch
from kvdata.edits.functions import learned_policy
from kvdata.edits.policies import Policy, Source, apply_policy_at
from kvdata.edits.rope import Rope
from kvdata.engines.huggingface import HuggingFaceEngine, attention_target
from kvdata.lightning import CacheWrite
from kvdata.models.losses import sample_tokens, scorer_loss, top_k_overlap, variance_explained
from kvdata.models.token_scorer import TokenScorer
from training.per_sample import STAGES, PerSample, per_stage
from training.recipe import Recipe

PREPARED_ON = 8  # caches that the query predictor is fitted to


class Teacher(PerSample):
    """What the continuation really attends to, computed from the cached KV: no prefix is computed again.

    Attention targets ``[B, L, H, T]``, see `attention_target`; an epoch after the first costs no model at all.
    """

    def __init__(self, engine: HuggingFaceEngine, max_bytes: float = 4e9) -> None:
        super().__init__(self._targets, max_bytes)
        self.engine = engine

    def _targets(self, batch: KVBatch) -> Tensor:
        heads = self.engine.layout.num_kv_heads
        return self.engine.attention(
            batch.kv, batch.continuation, reduce=lambda weights: attention_target(weights, heads)
        )


class TokenDropping(Recipe):
    """Trains a `TokenScorer` to predict which cached tokens later queries attend to.

    Each step scores a random sample of a batch's tokens: a cheaper step buys more of them. Use it with
    ``Trainer(gradient_clip_val=1.0)`` and small batches.

    Args:
        model, learning_rate, weight_decay, warmup_steps: see `Recipe`.
        width, dropout: of the scorer.
        sampled_tokens: tokens scored per step.
        keeps: budgets in tokens, for validation's overlap and for what ``predict`` puts out.
    """

    def __init__(
        self,
        model: str | HuggingFaceEngine = "smollm2",
        width: int = 128,
        dropout: float = 0.1,
        sampled_tokens: int = 128,
        keeps: Sequence[int] = (512, 256),
        learning_rate: float = 4e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__(model, learning_rate, weight_decay, warmup_steps)
        self.scorer = token_scorer(self.engine, width, dropout)
        self.sampled_tokens, self.keeps = sampled_tokens, tuple(keeps)
        # One memory for each stage: indices are those of its dataset.
        self._targets = {stage: Teacher(self.engine) for stage in STAGES}
        self._signals = per_stage(self._compute_signals)

    @property
    def compressor(self) -> TokenScorer:
        return self.scorer

    def on_train_start(self) -> None:
        """Fit the query predictor to the first caches of the training set, unless a checkpoint has it already."""
        if not self.scorer.calibrated:
            self._signals = per_stage(self._compute_signals)  # the sanity check's are old
            self.scorer.prepare(self._with_queries(self.trainer.train_dataloader.dataset))

    def _with_queries(self, dataset: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for sample in islice((dataset[i] for i in range(len(dataset))), PREPARED_ON):
            yield sample["kv"].to(self.device), self.engine.queries(sample["tokens"]).to(self.device)

    def training_step(self, batch: KVBatch, batch_index: int) -> Tensor:
        target = self._targets["train"](batch)
        chosen = sample_tokens(batch.kv.shape[3], self.sampled_tokens).to(batch.kv.device)
        scores = self.scorer(batch.kv, chosen, self._signals["train"](batch).transpose(0, 1))
        # The sample already leaves out the sinks and the window, which are kept whatever their score.
        loss = scorer_loss(scores, target.to(scores.device)[..., chosen], sinks=0, window=0)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: KVBatch, batch_index: int) -> None:
        self._judge(batch, "val")

    def test_step(self, batch: KVBatch, batch_index: int) -> None:
        self._judge(batch, "test")

    def _judge(self, batch: KVBatch, stage: str) -> None:
        """Log the loss, the explained variance of log attention (each layer's and the mean), and the overlap."""
        scores = self.scorer(batch.kv, None, self._signals[stage](batch).transpose(0, 1))
        target = self._targets[stage](batch).to(scores.device)
        explained = variance_explained(scores, target)
        values = {f"{stage}_loss": scorer_loss(scores, target), f"{stage}_r2": explained.mean()}
        values |= {f"{stage}_r2_layer{layer:02d}": r2 for layer, r2 in enumerate(explained)}
        values |= {f"{stage}_overlap_{k}": top_k_overlap(scores, target, k) for k in self.keeps if k < scores.shape[-1]}
        self.log_dict(values, batch_size=len(batch), sync_dist=True)

    def _compute_signals(self, batch: KVBatch) -> Tensor:
        return self.scorer.signals(batch.kv).transpose(0, 1)

    def predict_step(self, batch: KVBatch, batch_index: int) -> list[CacheWrite]:
        policies = [learned_policy(self.scorer, self.revision)]
        return compress(batch, policies, self.keeps, self.scorer.rope, self.scorer.num_kv_heads)


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
        return compress(batch, self.policies, self.keeps, self.rope, self.num_kv_heads, targets)


def compress(
    batch: KVBatch,
    policies: Sequence[tuple[Policy, str]],
    keeps: Sequence[int],
    rope: Rope,
    num_kv_heads: int,
    targets: Tensor | None = None,
) -> list[CacheWrite]:
    """Every policy (with its revision) at every budget for each cache of a batch."""
    writes = []
    for row, length in enumerate(batch.lengths.tolist()):
        kv = batch.kv[row, :, :, :length]
        tokens, index = batch.tokens[row, :length].tolist(), int(batch.index[row])
        source = Source(tokens=tokens, index=index, target=None if targets is None else targets[row])
        for policy, revision in policies:
            meta = {**batch.meta[row], "index": index}
            for smaller, _ in apply_policy_at(policy, kv, keeps, rope, num_kv_heads, source):
                writes.append(CacheWrite(smaller, tokens, policy.name, revision, batch.salts[row], meta))
    return writes


def token_scorer(engine: HuggingFaceEngine, width: int = 128, dropout: float = 0.1) -> TokenScorer:
    """A new scorer for the caches of a model."""
    layout, rope = engine.layout, Rope.from_config(engine.config)
    query_heads = engine.model.config.get_text_config(decoder=True).num_attention_heads
    return TokenScorer(layout.num_layers, layout.num_kv_heads, query_heads, layout.head_dim, rope, width, dropout)
