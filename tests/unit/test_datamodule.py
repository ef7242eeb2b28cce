"""Caches under a Lightning Trainer: resumed in the middle of an epoch, on any number of ranks and workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from kvdata import Connection, KVCacheDataset
from kvdata.datasets import KVLoader
from kvdata.errors import InvalidRequest
from kvdata.lightning import KVCacheDataModule, KVCacheStats
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv

COUNT, BATCH = 22, 2

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*",
    "ignore:.*exists and is not empty.*",
    "ignore:.*does not have many workers.*",
    "ignore:.*infer the batch indices.*",
)


class Stop(Exception):
    """A crash."""


class Module(L.LightningModule):
    """Notes which samples it is trained on, and crashes at a step."""

    def __init__(self, crash_at: int | None = None, steps_asked: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.crash_at, self.steps_asked = crash_at, steps_asked
        self.seen: list[int] = []

    def training_step(self, batch, batch_idx):
        if self.global_step == self.crash_at:
            raise Stop
        self.seen += batch.index.tolist()
        return self.layer(batch.kv.float().mean().view(1)).sum()

    def predict_step(self, batch, batch_idx):
        return batch.index.tolist()

    def configure_optimizers(self):
        if self.steps_asked:  # makes Lightning set its loops up before it restores the loaders' states
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), 1e-3)


class Validating(Module):
    """And on which it is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def validation_step(self, batch, batch_idx):
        self.validated += batch.index.tolist()


def trainer(folder: Path, **options) -> L.Trainer:
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    callbacks = [checkpoint, *options.pop("callbacks", [])]
    return L.Trainer(**{**quiet, "devices": 1, "max_epochs": 2, **options}, callbacks=callbacks)


@pytest.fixture
def dataset(connection):
    prompts = [fresh_tokens(32) for _ in range(COUNT)]
    with connection.connect() as ctx:
        for prompt in prompts:
            ctx.store(random_kv(32), prompt)
    dataset = KVCacheDataset(prompts, connection=connection)
    yield dataset
    dataset.close()


def module_of(dataset, **options) -> KVCacheDataModule:
    return KVCacheDataModule(dataset, batch_size=BATCH, seed=5, **options)


@pytest.mark.parametrize("crash_at", [4, 11, 15])
@pytest.mark.parametrize("asked", [False, True])
def test_a_crashed_run_goes_on_at_the_sample_where_it_was(dataset, tmp_path, crash_at, asked):
    undisturbed = Module()
    trainer(tmp_path / "whole").fit(undisturbed, datamodule=module_of(dataset))
    assert sorted(undisturbed.seen[:COUNT]) == sorted(undisturbed.seen[COUNT:]) == list(range(COUNT))
    assert undisturbed.seen[:COUNT] != undisturbed.seen[COUNT:]
    crashed, resumed = Module(crash_at, asked), Module(None, asked)
    with pytest.raises(Stop):
        trainer(tmp_path / "crash").fit(crashed, datamodule=module_of(dataset))
    last = tmp_path / "crash" / f"step={crash_at}.ckpt"
    trainer(tmp_path / "crash").fit(resumed, datamodule=module_of(dataset, threads=1), ckpt_path=last)
    assert crashed.seen + resumed.seen == undisturbed.seen


def test_threads_and_workers_may_be_exchanged(dataset, tmp_path):
    crashed, resumed = Module(3), Module()
    with pytest.raises(Stop):
        trainer(tmp_path, max_epochs=1).fit(crashed, datamodule=module_of(dataset, num_workers=2))
    run = trainer(tmp_path, max_epochs=1)
    run.fit(resumed, datamodule=module_of(dataset), ckpt_path=tmp_path / "step=3.ckpt")
    whole = [index for batch in KVLoader(dataset, BATCH, shuffle=True, seed=5) for index in batch.index.tolist()]
    assert crashed.seen + resumed.seen == whole


def test_other_prefixes_are_refused(dataset, connection, tmp_path):
    with pytest.raises(Stop):
        trainer(tmp_path).fit(Module(2), datamodule=module_of(dataset))
    other = KVCacheDataset([fresh_tokens(32) for _ in range(COUNT)], connection=connection)
    with pytest.raises(InvalidRequest, match="another prefixes"):
        trainer(tmp_path).fit(Module(), datamodule=module_of(other), ckpt_path=tmp_path / "step=2.ckpt")


@pytest.mark.parametrize("workers", [0, 2])
def test_every_stage_has_its_loader(dataset, tmp_path, workers):
    data = KVCacheDataModule(dataset, val=dataset, predict=dataset, batch_size=5, num_workers=workers)
    stats = KVCacheStats(every_n_steps=2)
    logger = CSVLogger(tmp_path)
    run = trainer(tmp_path, max_epochs=1, callbacks=[stats], logger=logger, log_every_n_steps=1)
    module = Validating()
    run.fit(module, datamodule=data)
    assert module.validated[-COUNT:] == list(range(COUNT))
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    last = dict(zip(rows[0].split(","), rows[-1].split(","), strict=True))
    assert float(last["kv/hits"]) >= COUNT
    assert float(last["kv/misses"]) == float(last["kv/retries"]) == 0
    assert 0 < float(last["kv/wait_seconds"]) == pytest.approx(stats.wait_seconds, rel=0.5)
    assert 0 < float(last["kv/wait_share"]) <= 1
    predicted = run.predict(Module(), datamodule=data)
    assert [index for batch in predicted for index in batch] == list(range(COUNT))
    with pytest.raises(ValueError, match="without test="):
        data.test_dataloader()


def distributed(url: str, http_url: str, prompts: str, folder: str, crash_at: str) -> None:
    """Two ranks: what `test_ranks_...` runs in a process of its own."""
    connection = Connection(url, http_url, "unit/model", 30.0, LAYOUT)
    dataset = KVCacheDataset(json.loads(Path(prompts).read_text()), connection=connection)
    module = Module(int(crash_at))
    run = trainer(Path(folder), max_epochs=1, devices=2, strategy="ddp")
    try:
        run.fit(module, datamodule=module_of(dataset))
    except Stop:
        (Path(folder) / f"rank-{run.global_rank}.json").write_text(json.dumps(module.seen))


def test_ranks_share_an_epoch_and_one_alone_can_finish_it(dataset, connection, tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([record.tokens.tolist() for record in dataset.prefixes]))
    code = "import sys; from tests.unit.test_datamodule import distributed; distributed(*sys.argv[1:])"
    where = [connection.url, connection.http_url, str(prompts), str(tmp_path), "3"]
    script = tmp_path / "run.py"  # Lightning starts the other rank with the same command
    script.write_text(code)
    found = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, str(script), *where], check=True, timeout=110, capture_output=True, env=found)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    resumed = Module()
    trainer(tmp_path, max_epochs=1).fit(resumed, datamodule=module_of(dataset), ckpt_path=tmp_path / "step=3.ckpt")
    assert [len(seen) for seen in ranks] == [6, 6]
    assert sorted(ranks[0] + ranks[1] + resumed.seen) == list(range(COUNT))
