"""A training run while its server is killed and restarted, and its caches are evicted and computed again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from kvdata.datasets import KVBatchSampler
from kvdata.lightning import KVCacheDataModule
from tests.faults.conftest import fault_servers
from tests.faults.outages import LAYOUT, Counted, Interrupted, Outages, Reads, every, refilling
from tests.servers import Server, release_of

# 48 chunks, of which a server's pool holds 40 and keeps 32.
PROMPTS = [list(range(1000 * number, 1000 * number + 64 * (1 + number % 2))) for number in range(32)]
BATCH, SEED = 2, 3
STEPS = len(PROMPTS) // BATCH

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*LeafSpec.*", "ignore:.*exists and is not empty.*", "ignore:.*does not have many workers.*"
    ),
    pytest.mark.timeout(600),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mortal" in metafunc.fixturenames:
        kinds = ["embedded", *fault_servers(metafunc.config)]
        ids = ["embedded", *(f"lmcache-{'.'.join(map(str, release_of(kind)))}" for kind in kinds[1:])]
        metafunc.parametrize("mortal", kinds, ids=ids, indirect=True, scope="module")


@pytest.fixture(scope="module")
def mortal(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that is killed, and started again."""
    pool_mb = 20
    assert sum(map(len, PROMPTS)) * LAYOUT.token_bytes > pool_mb << 20, "nothing would be evicted"
    running = Server(request.param, "shm", pool_mb=pool_mb).start()
    yield running
    running.stop()


def fit(module: Reads, dataset: Counted, folder: Path, workers: int, resume: bool = False) -> None:
    """Train until the module says that an epoch was the last; with a checkpoint after each step."""
    last = ModelCheckpoint(folder, "last", every_n_train_steps=1, enable_version_counter=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    data = KVCacheDataModule(dataset, batch_size=BATCH, shuffle=True, seed=SEED, num_workers=workers)
    run = L.Trainer(max_epochs=-1, callbacks=[last], **quiet)
    run.fit(module, datamodule=data, ckpt_path=folder / "last.ckpt" if resume else None)


def order(samples: int) -> list[int]:
    """The first samples of an undisturbed run."""
    sampler, found = KVBatchSampler(PROMPTS, BATCH, shuffle=True, seed=SEED), list[int]()
    while len(found) < samples:
        found += [index for batch in sampler for index in batch]
        sampler.finish()
    return found[:samples]


def check_counts(dataset: Counted, module: Reads) -> None:
    """What the dataset counted is what was asked for: of a run that ended by itself."""
    found, samples = dataset.stats(), len(module.seen)
    asked = found["hits"] + found["partial_hits"] + found["misses"]
    assert found["samples"] == asked == samples, found
    assert found["refilled"] == found["misses"] + found["partial_hits"] > 0, found
    assert dataset.tried.value == dataset.asked.value + found["retries"], found
    assert dataset.asked.value >= samples / BATCH


def ride_out(
    server: Server, folder: Path, workers: int, count: int, due: Callable[[Reads, float], bool], retries: int = 20
) -> dict[str, float]:
    """A run through the first half of ``count`` outages, broken off, and one that goes on through the others.

    Returns the statistics of the second.
    """
    half, started = count // 2, time.monotonic()
    datasets = [refilling(server, PROMPTS, retries) for _ in range(2)]
    first = Reads()
    with Outages(server, half, lambda up: due(first, up)) as outages:
        at = -1

        def interrupted() -> bool:  # in the middle of an epoch, behind the last outage
            nonlocal at
            at = len(first.seen) // BATCH + STEPS + 3 if at < 0 and outages.over() else at
            return at == len(first.seen) // BATCH

        first.interrupted = interrupted
        with pytest.raises(Interrupted):
            fit(first, datasets[0], folder, workers)
    second = Reads()
    with Outages(server, count - half, lambda up: due(second, up)) as outages:
        second.ended = outages.over
        fit(second, datasets[1], folder, workers, resume=True)
    assert outages.had == count - half
    assert not first.wrong + second.wrong
    assert first.seen + second.seen == order(len(first.seen) + len(second.seen))
    check_counts(datasets[1], second)
    stats = datasets[1].stats()
    print(f"{time.monotonic() - started:.0f} s, {len(first.seen)} + {len(second.seen)} samples, {stats}")
    for dataset in datasets:
        dataset.close()
    return stats


@pytest.mark.parametrize("workers", [0, 2], ids=["threads", "workers"])
def test_a_run_outlives_its_server_and_resumes_where_it_was(mortal, tmp_path, workers, monkeypatch):
    for name, seconds in (("_FIRST_WAIT", 0.1), ("_JITTER", 0.1), ("_LONGEST_WAIT", 0.5)):
        monkeypatch.setattr(f"kvdata.datasets.retry.{name}", seconds)
    ride_out(mortal, tmp_path, workers, 1, lambda module, _: len(module.seen) > STEPS, retries=200)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2], ids=["threads", "workers"])
def test_three_minutes_of_outages(mortal, tmp_path, workers):
    due = every(20.0)
    assert ride_out(mortal, tmp_path, workers, 9, lambda _, up: due(up))["retries"] > 0
