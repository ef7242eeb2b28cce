"""What all recipes share: the engine they are taught by, the optimiser, and what ``predict`` puts out.

Axes: ``B`` batch, ``2`` K/V, ``L`` layers, ``H`` KV heads, ``T`` prefix tokens, ``D = H * head_dim``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch

from kvdata.cli.options import model_folder
from kvdata.edits.functions import weights_revision
from kvdata.engines.huggingface import HuggingFaceEngine, fast_dtype
from kvdata.models.files import CHECKPOINT_KEY, SavedModule


class Recipe(L.LightningModule):
    """A LightningModule with a frozen language model beside it, AdamW with warm-up and cosine decay.

    Args:
        model: folder of the model whose caches are read, or ``smollm2``; or an engine that is loaded already.
        learning_rate, weight_decay: of AdamW; linear warm-up, then cosine decay to zero over the run.
        warmup_steps: steps of the warm-up.
    """

    def __init__(
        self,
        model: str | HuggingFaceEngine = "smollm2",
        learning_rate: float = 4e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.learning_rate, self.weight_decay, self.warmup_steps = learning_rate, weight_decay, warmup_steps
        # Not a submodule: the language model's weights stay out of checkpoints and of the optimiser.
        self._revision = ""
        self._engine = [load_engine(model) if isinstance(model, str) else model]

    @property
    def engine(self) -> HuggingFaceEngine:
        """The language model, frozen."""
        return self._engine[0]

    @property
    def compressor(self) -> SavedModule:
        """What is trained: a checkpoint carries it so that it loads without Lightning."""
        raise NotImplementedError

    @property
    def revision(self) -> str:
        """Hash of what is trained, for addresses; computed once for a whole ``predict``."""
        return self._revision or weights_revision(self.compressor)

    def on_predict_start(self) -> None:
        self._revision = weights_revision(self.compressor)

    def on_predict_end(self) -> None:
        self._revision = ""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = self.compressor.exported()

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad],
            self.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=self.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        total = max(1, int(self.trainer.estimated_stepping_batches) - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - self.warmup_steps) / total)))


def load_engine(model: str | Path) -> HuggingFaceEngine:
    """The model of a folder or ``smollm2``, in the fastest dtype this machine has."""
    return HuggingFaceEngine.from_pretrained(model_folder(str(model)), dtype=fast_dtype())
