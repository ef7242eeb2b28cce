"""`KVCacheStats`: what reading caches costs a training, in its logs."""

from __future__ import annotations

import time
from typing import Any

try:
    import lightning as L
except ImportError as missing:
    raise ImportError("kvdata.lightning needs lightning: pip install 'kvdata[train]'") from missing

_LOGGED = ("hits", "partial_hits", "misses", "skipped", "refilled", "retries", "gb_per_s")


class KVCacheStats(L.Callback):
    """Logs the training dataset's counts and the wait for batches, as ``kv/hits``, ``kv/wait_seconds`` and so on.

    Counts are sums since the dataset was made; ``kv/wait_share`` is the share of the time since training began that
    was spent waiting for batches.

    Args:
        every_n_steps: how often to log.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self.every_n_steps = every_n_steps
        self.wait_seconds = 0.0
        self._began = self._ended = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = self._ended = time.monotonic()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.wait_seconds += time.monotonic() - self._ended

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.every_n_steps == 0 or trainer.is_last_batch:
            values = {f"kv/{name}": float(value) for name, value in self._stats(trainer).items()}
            values["kv/wait_seconds"] = self.wait_seconds
            values["kv/wait_share"] = self.wait_seconds / max(time.monotonic() - self._began, 1e-9)
            pl_module.log_dict(values, batch_size=1)
        self._ended = time.monotonic()

    def _stats(self, trainer: L.Trainer) -> dict[str, float]:
        stats = getattr(getattr(trainer.train_dataloader, "dataset", None), "stats", None)
        return {name: value for name, value in stats().items() if name in _LOGGED} if stats is not None else {}
