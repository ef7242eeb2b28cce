"""A server that is killed and started again while a training reads from it, and how to tell that it read right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing import Value
from typing import Any, TypeAlias

import lightning as L
import torch

from kvdata import Connection, KVCacheDataset, KVLayout
from tests.servers import Server

LAYOUT = KVLayout(num_layers=8, num_kv_heads=4, head_dim=64)  # 512 KiB a chunk of 64 tokens: 40 fill a pool of 20 MiB

Due: TypeAlias = Callable[[float], bool]  # seconds that the server has been up for


class Outages(AbstractContextManager["Outages"]):
    """Kills a server and starts it again on the same ports, in a thread, as often as is asked for.

    Args:
        server: runs.
        count: how many outages.
        due: whether the next one may come.
    """

    def __init__(self, server: Server, count: int, due: Due) -> None:
        self._server, self._count, self._due = server, count, due
        self._error: BaseException | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outages")
        self.had = 0

    def over(self) -> bool:
        """The server is up, and stays so."""
        return not self._thread.is_alive()

    def __enter__(self) -> Outages:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            up = time.monotonic()
            while self.had < self._count and not self._left.wait(0.01):
                if self._due(time.monotonic() - up):
                    self._server.kill()
                    self._server.start()
                    up = time.monotonic()
                    self.had += 1
        except BaseException as exc:
            self._error = exc


def every(seconds: float) -> Due:
    """Due so many seconds after the one before, or after now.

    A server that starts slowly is up for 12 s: retries don't wait that long, so they meet it.
    """
    following = time.monotonic() + seconds

    def due(up: float) -> bool:
        nonlocal following
        if time.monotonic() < following or up < 12.0:
            return False
        following = time.monotonic() + seconds
        return True

    return due


def cache_of(tokens: Sequence[int]) -> torch.Tensor:
    """The cache ``[2, L, T, D]`` of some tokens: each number tells where it belongs, and bfloat16 holds it exactly."""
    place = torch.arange(2 * LAYOUT.num_layers * LAYOUT.hidden).view(2, LAYOUT.num_layers, 1, LAYOUT.hidden)
    ids = torch.as_tensor(tokens)
    return ((place * 7 + (ids * 31 + torch.arange(len(ids)) * 5).unsqueeze(1)) % 251).to(LAYOUT.dtype)


class Engine:
    """Computes caches again; `Prefiller` for ``on_missing="refill"``."""

    def prefill(self, tokens: list[int]) -> torch.Tensor:
        return cache_of(tokens)


class Counted(KVCacheDataset):
    """Counts in all processes what was asked for: connections and batches, and how often each was tried."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked, self.tried = Value("q", 0), Value("q", 0)

    def open(self) -> None:
        _add_one(self.asked)
        super().open()

    def fetch(self, *arguments: Any) -> list[dict[str, Any]]:
        _add_one(self.asked)
        return super().fetch(*arguments)

    def _connect(self) -> None:
        _add_one(self.tried)
        super()._connect()

    def _fetch(self, *arguments: Any) -> list[dict[str, Any]]:
        _add_one(self.tried)
        return super()._fetch(*arguments)


def _add_one(count: Any) -> None:
    with count.get_lock():
        count.value += 1


def refilling(server: Server, prompts: Sequence[Sequence[int]], retries: int) -> Counted:
    """A dataset that computes again what is gone, and bears with outages."""
    connection = Connection(server.url, server.http_url, "tests/outages", 20.0, LAYOUT)
    return Counted(prompts, connection=connection, on_missing="refill", refill=Engine(), retries=retries)


class Interrupted(Exception):
    """What ends a run in its middle."""


class Reads(L.LightningModule):
    """Compares each sample that it is trained on with `cache_of`, bit for bit.

    Args:
        ended: after an epoch, whether it was the last.
        interrupted: before a step, whether the run breaks off there.
    """

    def __init__(self, ended: Callable[[], bool] = bool, interrupted: Callable[[], bool] = bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.ended, self.interrupted = ended, interrupted
        self.seen: list[int] = []
        self.wrong: list[int] = []

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        if self.interrupted():
            raise Interrupted
        for row, (index, length) in enumerate(zip(batch.index.tolist(), batch.lengths.tolist(), strict=True)):
            self.seen.append(index)
            if not torch.equal(batch.kv[row, :, :, :length], cache_of(batch.tokens[row, :length])):
                self.wrong.append(index)
        loss: torch.Tensor = self.layer(batch.kv.float().mean().view(1)).sum()
        return loss

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.ended()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)
