"""KVCacheWriter on two ranks, real processes that talk by gloo: they agree, or all of them say who failed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from kvdata import Connection
from kvdata.datasets import Manifest
from kvdata.lightning import CacheWrite, KVCacheWriter
from tests.unit.conftest import LAYOUT
from tests.unit.ranks import run_ranks
from tests.unit.writes import Trains, readable, trainer

pytestmark = pytest.mark.timeout(450)  # two processes import everything first, perhaps on a busy machine


def cache(first: int, number: int, tokens: int = 64) -> CacheWrite:
    """The same on every rank; 33 ``tokens`` cannot be stored."""
    generator = torch.Generator().manual_seed(number)
    kv = torch.randn(2, LAYOUT.num_layers, tokens, LAYOUT.hidden, generator=generator).to(LAYOUT.dtype)
    return CacheWrite(kv, range(first + 1000 * number, first + 1000 * number + 128), "keydiff", meta={"n": number})


class Fails(Trains):
    """Puts out the cache of each sample's number. The ``bad`` one's cannot be stored: a next batch waits for that."""

    def __init__(self, first: int, bad: int, writer: KVCacheWriter):
        super().__init__([], [])
        self.first, self.bad, self.writer = first, bad, writer

    def test_step(self, batch, index):
        while index and self.trainer.global_rank == self.bad and not self.writer.counts.failed:
            time.sleep(0.01)
        return [cache(self.first, n, 33 if n == self.bad else 64) for n in batch.tolist()]

    def training_step(self, batch, index):
        return {"loss": self.layer(torch.ones(1)).sum(), "cache_writes": self.test_step(batch, index)}


# What both ranks do, one after the other: how many samples, which of them cannot be stored, and whether they train. In
# the last, rank 1 has a second batch at which it raises, while rank 0 has nothing to complain about.
RUNS = {"padded": (3, -1, False), "failed": (2, 1, False), "trained": (2, 1, True), "left": (4, 1, False)}
FIRST = {name: 10_000_000 + 100_000 * number for number, name in enumerate(RUNS)}


def rank(url: str, http_url: str, folder: str) -> None:
    """One rank of all runs: what `both` starts in processes of their own."""
    connection = Connection(url, http_url, "unit/model", 30.0, LAYOUT)
    for name, (count, bad, trains) in RUNS.items():
        place = Path(folder) / name
        writer = KVCacheWriter(connection, place / "m.jsonl", ["train", "test"], verify_every=1)
        checkpoint = ModelCheckpoint(place / "checkpoints", every_n_train_steps=1)
        two = trainer(writer, devices=2, strategy="ddp", max_epochs=1, callbacks=[checkpoint])
        module, loader = Fails(FIRST[name], bad, writer), DataLoader(range(count))
        said = ""
        try:
            two.fit(module, loader) if trains else two.test(module, loader, verbose=False)
        except Exception as exc:
            said = f"{type(exc).__name__}: {exc}"
        place.mkdir(exist_ok=True)
        found = {"said": said, "stored": writer.counts.stored, "deduplicated": writer.counts.deduplicated}
        (place / f"rank-{two.global_rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def folder(embedded, tmp_path_factory) -> Path:
    """Where both ranks have done all runs."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(folder, __name__, embedded.url, embedded.http_url, str(folder))
    return folder


def both(folder: Path) -> list[dict[str, Any]]:
    """What each rank says."""
    return [json.loads((folder / f"rank-{number}.json").read_text()) for number in range(2)]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("m.jsonl")}


def test_a_padded_sample_is_written_once_and_the_manifest_has_all_ranks_caches(folder, connection):
    place = folder / "padded"
    ranks = both(place)  # the sampler gave rank 1 sample 0 again
    assert [found["said"] for found in ranks] == ["", ""]
    assert sum(found["stored"] + found["deduplicated"] for found in ranks) == 4
    assert sum(found["stored"] for found in ranks) in (3, 4)  # 4 where both ranks wrote some of its chunks
    assert files(place) == {"m.jsonl"}
    lines = (place / "m.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["meta"]["n"] for line in lines) == [0, 1, 2]
    assert all(readable(connection, cache(FIRST["padded"], number)) for number in range(3))


def test_all_ranks_raise_what_one_failed_with_and_the_next_run_completes_the_manifest(folder, connection):
    place = folder / "failed"
    ranks = both(place)
    assert all(found["said"].startswith("StoreFailed: rank 1: storing") for found in ranks)
    assert all("33 kept tokens are not whole chunks" in found["said"] for found in ranks)
    assert [found["stored"] for found in ranks] == [1, 0]
    assert files(place) == {"m.jsonl.rank0.part", "m.jsonl.rank1.part"}
    alone = KVCacheWriter(connection, place / "m.jsonl")
    alone.submit(cache(FIRST["failed"], 1))
    alone.flush()
    assert {entry.meta["n"] for entry in Manifest.load(place / "m.jsonl")} == {0, 1}
    assert files(place) == {"m.jsonl"}


def test_no_rank_writes_a_checkpoint_unless_all_have_stored_what_was_before_it(folder):
    assert all(found["said"].startswith("StoreFailed: rank 1: storing") for found in both(folder / "trained"))
    assert not (folder / "trained" / "checkpoints").exists()


def test_a_rank_that_ends_early_does_not_leave_the_other_waiting(folder):
    ranks = both(folder / "left")
    assert ranks[1]["said"].startswith("StoreFailed: storing compressed caches failed: 33 kept tokens")
    assert ranks[0]["said"].startswith("StoreFailed: another rank ended before all agreed")
    assert ranks[0]["stored"] == 2
    assert "m.jsonl.rank0.part" in files(folder / "left")
