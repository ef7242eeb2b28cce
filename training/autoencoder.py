"""KV autoencoder: fit a linear code to live caches, train it on the attention's output, write reconstructions back.

    python -m training fit --config training/configs/autoencoder.yaml

Axes: ``B`` batch, ``2`` K/V, ``L`` layers, ``H`` KV heads, ``Hq`` query heads, ``T`` prefix tokens, ``N`` later
queries, ``D = H * head_dim``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvdata.datasets import KVBatch, collate
from kvdata.edits.functions import Reconstruction
from kvdata.edits.rope import Rope
from kvdata.engines.huggingface import HuggingFaceEngine
from kvdata.lightning import CacheWrite
from kvdata.models.attention_output import attention_output_error
from kvdata.models.kv_autoencoder import KVAutoencoder
from kvdata.models.low_rank import PRECISIONS, water_fill, whitened_basis
from kvdata.models.moments import Moments
from training.per_sample import per_stage
from training.recipe import Recipe


class Autoencoder(Recipe):
    """Trains a `KVAutoencoder` so that later queries read from its caches what they read from the full ones.

    At the start the linear code that is best under `Moments.metric` is fitted to the training caches, and the bytes
    are shared out between layers, keys and values. A checkpoint is an edit:
    ``batch.modify(autoencoder("best.ckpt", config))``. Use it with ``Trainer(gradient_clip_val=1.0)``.

    Args:
        model, learning_rate, warmup_steps: see `Recipe`.
        ratio: bytes of an encoded cache over the full one's, scales and exact tokens included.
        precisions: bits that a latent coordinate may have, of 4, 8 and 16.
        context_tokens: length of cache at which `ratio` holds: sinks and window weigh less in a longer one.
        sinks, window: first and last tokens that are kept exactly.
        sampled_queries: later queries per step, drawn at random.
        calibrated_on: caches of the training set, at most, that the start is fitted to.
        weight_decay: 0, since the weights start as identities, not at zero.
    """

    def __init__(
        self,
        model: str | HuggingFaceEngine = "smollm2",
        ratio: float = 0.5,
        precisions: Sequence[int] = PRECISIONS,
        context_tokens: int = 1024,
        sinks: int = 4,
        window: int = 0,
        sampled_queries: int = 32,
        calibrated_on: int = 64,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__(model, learning_rate, weight_decay, warmup_steps)
        layout, self.rope = self.engine.layout, Rope.from_config(self.engine.config)
        self.autoencoder = KVAutoencoder(
            layout.num_layers, layout.num_kv_heads, layout.head_dim, self.rope, sinks=sinks, window=window
        )
        self.ratio, self.precisions, self.context_tokens = ratio, tuple(precisions), context_tokens
        self.sampled_queries, self.calibrated_on = sampled_queries, calibrated_on
        self._queries = per_stage(self._ask)

    @property
    def compressor(self) -> KVAutoencoder:
        return self.autoencoder

    def _ask(self, batch: KVBatch) -> Tensor:
        """The queries of the continuations, before RoPE, ``[B, L, Hq, N, head_dim]``: no prefix is computed again."""
        return self.engine.queries(batch.continuation, batch.kv)

    def on_train_start(self) -> None:
        """Fit the code to the first caches of the training set, unless a checkpoint has it already."""
        if not self.autoencoder.bits.any():
            self.calibrate(self.trainer.train_dataloader.dataset)

    @torch.no_grad()
    def calibrate(self, dataset: Any) -> None:
        """Fit the initial code, and share out the bytes; under DDP each rank reads its part of the caches.

        Raises:
            InvalidRequest: the ratio leaves too few bytes for the tokens that are coded.
        """
        model = self.autoencoder
        moments = Moments(model.num_layers, model.num_kv_heads, model.head_dim, self.rope)
        distributed = torch.distributed.is_initialized()
        rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
        generator = torch.Generator().manual_seed(rank)
        for index in range(rank, min(len(dataset), self.calibrated_on), ranks):
            batch = collate([dataset[index]])
            moments.update(model.coded(batch.kv.cpu()).cpu(), self._queries["train"](batch), generator)
        for total in moments.sums if distributed else ():
            torch.distributed.all_reduce(total)
        basis = whitened_basis(moments.covariance(), moments.metric())
        budget = model.token_budget(self.ratio, self.context_tokens)
        model.initialise(basis, moments.mean(), water_fill(basis.spectrum, budget, self.precisions, model.group))

    def training_step(self, batch: KVBatch, batch_index: int) -> Tensor:
        count = batch.continuation.shape[1]
        loss = self._error(batch, "train", torch.randperm(count)[: self.sampled_queries])
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: KVBatch, batch_index: int) -> None:
        self._judge(batch, "val")

    def test_step(self, batch: KVBatch, batch_index: int) -> None:
        self._judge(batch, "test")

    def _judge(self, batch: KVBatch, stage: str) -> None:
        """Log the relative error of the attention's output, and the bytes over those of the full cache."""
        error = self._error(batch, stage, torch.arange(batch.continuation.shape[1]))
        values = {f"{stage}_loss": error, f"{stage}_bytes_ratio": self.autoencoder.ratio(batch.kv.shape[3])}
        self.log_dict(values, batch_size=len(batch), sync_dist=True)

    def predict_step(self, batch: KVBatch, batch_index: int) -> list[CacheWrite]:
        """Every cache as the autoencoder gives it back, for a `KVCacheWriter`."""
        return [
            CacheWrite(
                self.autoencoder(batch.kv[row : row + 1, :, :, :length])[0],
                batch.tokens[row, :length].tolist(),
                Reconstruction.name,
                self.revision,
                batch.salts[row],
                meta={**batch.meta[row], "index": int(batch.index[row])},
            )
            for row, length in enumerate(batch.lengths.tolist())
        ]

    def _error(self, batch: KVBatch, stage: str, chosen: Tensor) -> Tensor:
        """Relative squared error of the attention's output, mean over layers."""
        length = batch.kv.shape[3]
        queries = self._queries[stage](batch)[..., chosen, :].transpose(0, 1)  # layers first, for `rerotate`
        rotated = self.rope.rerotate(queries, 0, length + chosen).transpose(0, 1).to(batch.kv.device)
        return attention_output_error(self.autoencoder(batch.kv.float()), batch.kv, rotated).mean()
