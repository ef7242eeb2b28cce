"""Modules and caches for the tests of KVCacheWriter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from kvdata import Connection
from kvdata.lightning import CacheWrite, KVCacheWriter
from tests.unit.conftest import fresh_tokens, random_kv

QUIET = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*LeafSpec.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*exists and is not empty.*",
    "ignore:.*no `val_dataloader`.*",
)


class Emits(L.LightningModule):
    """A module whose steps put out prepared writes; ``before(index)`` is called at the beginning of each."""

    def __init__(self, batches, fail_at=None, as_dict=False, before: Callable[[int], Any] = id):
        super().__init__()
        self.batches, self.fail_at, self.as_dict, self.before = batches, fail_at, as_dict, before

    def predict_step(self, batch, index):
        self.before(index)
        if index == self.fail_at:
            raise RuntimeError("the model failed")
        return {"cache_writes": self.batches[index]} if self.as_dict else self.batches[index]

    test_step = predict_step


class Trains(Emits):
    """Puts out writes in training and validation steps, too."""

    def __init__(self, batches, validation):
        super().__init__(batches)
        self.layer = torch.nn.Linear(1, 1)
        self.validation = validation

    def training_step(self, batch, index):
        return {"loss": self.layer(torch.ones(1)).sum(), "cache_writes": self.batches[index]}

    def validation_step(self, batch, index):
        return self.validation[index]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def write(tokens=64, policy="keydiff", **options) -> CacheWrite:
    source = fresh_tokens(2 * tokens)
    return CacheWrite(random_kv(tokens), source, policy, **options)


def trainer(writer: KVCacheWriter, **options) -> L.Trainer:
    callbacks = [writer, *options.pop("callbacks", [])]
    if len(callbacks) == 1:
        options.setdefault("enable_checkpointing", False)
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(callbacks=callbacks, **{**quiet, **options})


def predict(writer: KVCacheWriter, module: Emits) -> None:
    loader = DataLoader(range(len(module.batches)))
    trainer(writer).predict(module, loader, return_predictions=False)


def readable(connection: Connection, written: CacheWrite) -> bool:
    with connection.connect() as ctx:
        found = ctx.retrieve(*written.address())
    return found is not None and torch.equal(found, written.kv)


def writer_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "kvdata-writer"]
