"""`KVCacheDataModule`: caches as a LightningDataModule that resumes in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import lightning as L
except ImportError as missing:
    raise ImportError("kvdata.lightning needs lightning: pip install 'kvdata[train]'") from missing

from kvdata.datasets.base import CacheDataset
from kvdata.datasets.collate import collate
from kvdata.datasets.loader import KVLoader
from kvdata.datasets.worker_loader import KVDataLoader


class KVCacheDataModule(L.LightningDataModule):
    """Loaders over datasets of caches; the training loader's place is part of the checkpoint.

    A run resumed from a checkpoint goes on behind the last batch that was trained on, with no sample twice or
    skipped, also with another number of ranks, workers or threads. Other prefixes are refused.

    Args:
        train, val, test, predict: the datasets.
        batch_size, shuffle, drop_last, max_tokens, seed: as in `KVLoader`; only training is shuffled.
        collate_fn: samples -> batch.
        num_workers: 0 for a `KVLoader` with threads, else a `KVDataLoader` with so many processes.
        loader_options: the other arguments of either.
    """

    def __init__(
        self,
        train: CacheDataset | None = None,
        val: CacheDataset | None = None,
        test: CacheDataset | None = None,
        predict: CacheDataset | None = None,
        batch_size: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        max_tokens: int | None = None,
        seed: int = 0,
        *,
        collate_fn: Callable[[list[Any]], Any] = collate,
        num_workers: int = 0,
        **loader_options: Any,
    ) -> None:
        super().__init__()
        self._datasets = {"train": train, "val": val, "test": test, "predict": predict}
        self._batches = {"batch_size": batch_size, "drop_last": drop_last, "max_tokens": max_tokens, "seed": seed}
        self._shuffle = shuffle
        self._options = {"collate_fn": collate_fn, **loader_options}
        self._num_workers = num_workers
        self._training: KVLoader | KVDataLoader | None = None
        self._resumed: dict[str, Any] | None = None
        if val is None:  # Lightning then fits without validating
            self.val_dataloader = None  # type: ignore[method-assign, assignment]

    def dataset(self, split: str) -> CacheDataset | None:
        """The dataset of ``train``, ``val``, ``test`` or ``predict``, if there is one."""
        return self._datasets[split]

    def train_dataloader(self) -> Any:
        loader = self._loader("train", self._shuffle)
        if self._resumed is not None:
            loader.load_state_dict(self._resumed)
        self._training = loader
        return loader

    def val_dataloader(self) -> Any:
        return self._loader("val")

    def test_dataloader(self) -> Any:
        return self._loader("test")

    def predict_dataloader(self) -> Any:
        return self._loader("predict")

    def state_dict(self) -> dict[str, Any]:
        """The training loader's place; the same on every rank."""
        state = self._resumed if self._training is None else self._training.state_dict()
        return {} if state is None else {"train": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict.get("train")

    def teardown(self, stage: str) -> None:
        """Disconnect this process's datasets; they connect again when they are used again."""
        for dataset in self._datasets.values():
            close = getattr(dataset, "close", None)
            if close is not None:
                close()

    def _loader(self, name: str, shuffle: bool = False) -> KVLoader | KVDataLoader:
        dataset = self._datasets[name]
        if dataset is None:
            raise ValueError(f"this KVCacheDataModule was made without {name}=")
        options = {**self._batches, "shuffle": shuffle, **self._options}
        if self._num_workers:
            return KVDataLoader(dataset, num_workers=self._num_workers, **options)
        return KVLoader(dataset, **options)
