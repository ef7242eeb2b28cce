"""Cartridges: train a few slots until the model answers with them as with a long document's whole cache.

Axes: ``B`` texts of a step, ``2`` K/V, ``L`` layers, ``Hq`` query heads, ``H`` KV heads, ``T`` document tokens,
``S`` slots, ``N`` tokens of a text, ``M`` texts, ``D = H * head_dim``.

The slots begin as a compaction of the document's cache: keys are kept, and their values refitted, by the attention of
the queries that the model itself asks in continuations which it makes up. Then they are distilled (Cartridges,
arXiv 2506.06266), on such continuations and on what the model says about the document when it is asked to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvdata.datasets import KVBatch
from kvdata.edits.policies import Compaction, Source, apply_policy
from kvdata.edits.rope import Rope
from kvdata.engines.huggingface import HuggingFaceEngine
from kvdata.errors import InvalidRequest
from kvdata.evaluation.metrics import next_token_nll
from kvdata.lightning import CacheWrite
from kvdata.models.cartridge import Cartridge
from kvdata.models.distillation import top_k_kl
from training.continuations import OPENINGS, Texts, read_texts, write_texts
from training.recipe import Recipe


class CartridgeDistillation(Recipe):
    """Trains a `Cartridge` for the one document whose cache every batch holds.

    The first batch, of whatever stage, costs what is done once: texts are sampled, the model reads them on the full
    cache, and the slots are initialised. They are the same for the same seed, so a run resumes from its checkpoint.

    Args:
        model: see `Recipe`.
        slots: learned tokens, a whole number of the server's chunks.
        sinks: first slots, which are not trained.
        continuations: texts that go on from the document's end.
        openings: texts that begin with each of `training.continuations.OPENINGS`.
        held_out: how many of the continuations are only validated on.
        text_tokens: length of each text.
        texts_per_step: B.
        top_k: likeliest tokens on which the teacher's and the cartridge's predictions are compared.
        references: continuations whose queries the initial compaction matches.
        ridge: of the compaction.
        train_keys: False trains only the values.
        learning_rate: in units of each head's deviation; see `Recipe` for the other options of the optimiser.
        weight_decay: pulls towards the initial slots.
        seed: of the sampled texts and their order.
    """

    def __init__(
        self,
        model: str | HuggingFaceEngine = "smollm2",
        slots: int = 128,
        sinks: int = 4,
        continuations: int = 40,
        openings: int = 1,
        held_out: int = 8,
        text_tokens: int = 128,
        texts_per_step: int = 4,
        top_k: int = 64,
        references: int = 24,
        ridge: float = 0.01,
        train_keys: bool = True,
        learning_rate: float = 1e-2,
        weight_decay: float = 0.0,
        warmup_steps: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(model, learning_rate, weight_decay, warmup_steps)
        if not held_out < continuations:
            raise InvalidRequest(f"{held_out} of {continuations} continuations held out leave none to train on")
        self.engine.model.requires_grad_(False)
        layout = self.engine.layout
        self.cartridge = Cartridge(layout.num_layers, layout.num_kv_heads, layout.head_dim, slots, sinks)
        self.cartridge.keys.requires_grad_(train_keys)
        self.continuations, self.openings, self.held_out = continuations, openings, held_out
        self.text_tokens, self.texts_per_step, self.top_k = text_tokens, texts_per_step, top_k
        self.references, self.ridge, self.seed = references, ridge, seed
        self._texts: tuple[Texts, Texts] | None = None

    @property
    def compressor(self) -> Cartridge:
        return self.cartridge

    def training_step(self, batch: KVBatch, batch_index: int) -> Tensor:
        training, _ = self._prepared(batch)
        loss = self._divergence(training[self._chosen(len(training))])
        self.log("train_kl", loss, prog_bar=True, batch_size=1)
        return loss

    def validation_step(self, batch: KVBatch, batch_index: int) -> None:
        _, held_out = self._prepared(batch)
        parts = [held_out[i : i + self.texts_per_step] for i in range(0, len(held_out), self.texts_per_step)]
        losses = torch.stack([self._divergence(part) * len(part) for part in parts])
        self.log("val_kl", losses.sum() / len(held_out), prog_bar=True, batch_size=1, sync_dist=True)

    def test_step(self, batch: KVBatch, batch_index: int) -> None:
        """NLL of the true next tokens, which nothing was trained on."""
        kv, _ = self._document(batch)
        for name, cache in (("test_nll", self.cartridge.slots_as(kv.dtype)), ("test_nll_full", kv)):
            logits = self.engine.continue_from(cache, batch.continuation[0])
            self.log(name, next_token_nll(logits[None], batch.continuation)[0], batch_size=1, sync_dist=True)

    def predict_step(self, batch: KVBatch, batch_index: int) -> list[CacheWrite]:
        kv, tokens = self._document(batch)
        slots = self.cartridge.slots_as(kv.dtype)
        return [CacheWrite(slots, tokens, "cartridge", self.revision, prefix=batch.salts[0], meta=batch.meta[0])]

    def _divergence(self, texts: Texts) -> Tensor:
        """Mean KL of the cartridge's predictions from the full cache's, over all tokens of some texts."""
        slots = self.cartridge()
        logits = self.engine.logits(slots.expand(len(texts), *slots.shape), texts.ids)
        return top_k_kl(texts.log_probs.to(logits.device), texts.indices.to(logits.device), logits).mean()

    def _chosen(self, count: int) -> Tensor:
        """The texts of this step: each once before any comes again, the same after a resume, others on each rank."""
        step = self.global_step * self.trainer.world_size + self.global_rank
        steps = max(1, count // self.texts_per_step)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed + step // steps))
        start = step % steps * self.texts_per_step
        return order[start : start + self.texts_per_step]

    def _document(self, batch: KVBatch) -> tuple[Tensor, list[int]]:
        """The cache ``[2, L, T, D]`` and the ids of the batch's document, which must be the cartridge's."""
        if len(batch) != 1:
            raise InvalidRequest(f"a cartridge is trained on one document; the batch holds {len(batch)}")
        length = int(batch.lengths[0])
        tokens = batch.tokens[0, :length].tolist()
        if self.cartridge.source:
            self.cartridge.check(tokens)
        return batch.kv[0, :, :, :length], tokens

    def _prepared(self, batch: KVBatch) -> tuple[Texts, Texts]:
        """Texts to train on and held-out ones, after the first batch has made them and initialised the slots."""
        kv, tokens = self._document(batch)
        if self._texts is None:
            continuing, opened = self._write(kv, tokens)
            texts = read_texts(self.engine, kv, torch.cat((continuing, opened)), self.top_k)
            self._texts = texts[self.held_out :], texts[: self.held_out]
        if not self.cartridge.source:
            references = self._texts[0].ids[: self.references]
            self.cartridge.begin(initial_slots(self.engine, kv, references, self.cartridge.slots, self.ridge), tokens)
        return self._texts

    def _write(self, kv: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        encode = self.engine.tokenizer.encode if self.openings else None
        openings = [encode(text, add_special_tokens=False) for text in OPENINGS for _ in range(self.openings)]
        return write_texts(self.engine, kv, tokens, self.continuations, openings, self.text_tokens, generator)


def initial_slots(
    engine: HuggingFaceEngine, kv: Tensor, references: Tensor, slots: int, ridge: float, window: int = 32
) -> Tensor:
    """Compaction of a cache ``[2, L, T, D]`` to ``[2, L, slots, D]`` for the queries of texts ``[M, N]`` after it."""
    asked = torch.cat([engine.queries(part, kv.expand(len(part), *kv.shape)) for part in references.split(8)])
    policy = CompactionFor(Rope.from_config(engine.config), ridge=ridge, asked=asked)
    heads = engine.layout.num_kv_heads
    return apply_policy(policy, kv, slots, policy.rope, heads, Source(), window=min(window, slots // 4))[0]


@dataclass(frozen=True)
class CompactionFor(Compaction):
    """`Compaction` for given later queries instead of the prefix's own.

    Args:
        asked: ``[M, L, Hq, N, head_dim]``, before RoPE, of M texts that follow the prefix.
    """

    asked: Tensor | None = field(default=None, repr=False)
    name: str = "compaction-for"

    def reference_queries(self, kv: Tensor, source: Source, length: int) -> Tensor:
        assert self.asked is not None
        texts, tokens = self.asked.shape[0], self.asked.shape[3]
        flat = self.asked.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return self.rope.rerotate(flat, 0, length + torch.arange(tokens).repeat(texts))
