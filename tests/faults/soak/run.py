"""A soak from its start to its end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskID

from kvdata import Connection
from tests.faults.checks import MODEL, Place
from tests.faults.proxy import PATIENCE, Proxy
from tests.faults.soak import figures
from tests.faults.soak.harm import ALWAYS, HARMS, Harm, Stage
from tests.faults.soak.judge import Rules, judge
from tests.faults.soak.load import (
    LAYOUT,
    PARK,
    POOL_MB,
    RUN,
    STOP,
    THREADS,
    Plan,
    client_process,
    log_to,
    start_client,
    until_parked,
)
from tests.faults.soak.records import Held, Operation, Struck, read
from tests.faults.soak.report import summary
from tests.faults.web import WebProxy
from tests.servers import Server, release_of

TIMEOUT = 5.0
CLIENTS = 4  # two in this process, and two processes; the last one is killed
GROWTH = {figures.MEMORY: 32.0}
# Seconds after which a server forgets what clients left: locks and reservations; registrations. 30 are the least that a
# real one takes; they must come after the reservations, which a real one publishes with them.
TTL, GRACE = {True: 2.0, False: 5.0}, {True: 4.0, False: 30.0}


@dataclass(frozen=True)
class Outcome:
    """A soak's operations and faults, what was held, and what was violated."""

    operations: list[Operation]
    faults: list[Struck]
    held: list[Held]
    violations: list[str]
    figures: dict[str, Any]


def server_of(kind: str) -> Server:
    """One that soon gives up on clients that have gone."""
    embedded = kind == "embedded"
    flags = [f"--l1-{lock}-ttl-seconds={TTL[embedded]:g}" for lock in ("write", "read")]
    flags.append(f"--worker-registration-grace-seconds={GRACE[embedded]:g}")
    flags += [] if embedded else [f"--worker-reap-timeout-seconds={GRACE[embedded]:g}"]
    if release_of(kind) >= (0, 5, 6):
        flags.append(f"--session-ttl-seconds={TTL[embedded]:g}")
    return Server(kind, "shm", pool_mb=POOL_MB, flags=flags)


class Soak:
    """Clients on a server behind proxies, and what happens to them.

    Args:
        kind: of the server, as in `Server`.
        seconds: of load, besides the times of rest in which is measured.
        seed: of everything that is drawn.
        folder: for journals and logs.
        progress: where to show it.
    """

    def __init__(self, kind: str, seconds: float, seed: int, folder: Path, progress: Progress) -> None:
        self.seconds, self.folder, self._progress = seconds, folder, progress
        self.server = server_of(kind)
        self._embedded = kind == "embedded"
        self._random = random.Random(seed)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["tests.faults.soak.load"])
        self._control = self._processes.RawArray("i", 1 + CLIENTS * THREADS)
        self._seed = seed
        self._faults: list[Struck] = []
        self._violations: list[str] = []
        self._killed: list[str] = []
        self._clients: list[Any] = []
        self._sockets: list[list[str]] = []  # the server's, in each rest

    def run(self) -> Outcome:
        torch.set_num_threads(1)
        log_to(self.folder / "driver.log")
        self.server.start()
        place = Place(self.server, Proxy(self.server.url, self.server.release), WebProxy(self.server.http_url))
        connection = Connection(place.proxy.url, place.web.url, MODEL, TIMEOUT, LAYOUT)
        self._plan = Plan(connection, self._seed, self.folder)
        pace = 0.3 if self.seconds < 60 else 1.0
        self._stage = Stage(place, self._random, pace, self._replace_client, TTL[self._embedded])
        self.began = time.monotonic()
        try:
            return self._ran()
        finally:
            self._control[0] = STOP
            for process in self._clients[2:]:
                process.join(PATIENCE)
            place.web.close()
            place.proxy.close()
            self.server.stop()

    def _ran(self) -> Outcome:
        task = self._progress.add_task("warming up", total=self.seconds)
        self._clients = [start_client(self._plan, f"threads-{n}", self._control, 1 + n * THREADS) for n in range(2)]
        self._clients += [self._process(n, f"process-{n}") for n in range(2, CLIENTS)]
        self._disturb(task, 0.1, HARMS)
        start = self._rest()
        self._disturb(task, 0.4, HARMS)
        middle = self._rest()
        self._disturb(task, 0.5, [harm for harm in HARMS if not harm.deadly])
        end = self._rest({**start, "server": middle["server"]})
        held = [Held(who, start[who], end[who]) for who in start if who != "server"]
        held.append(Held("server", middle["server"], end["server"]))
        return self._judged(held)

    def _judged(self, held: list[Held]) -> Outcome:
        self._control[0] = STOP
        for client in [*self._clients[0], *self._clients[1], *self._clients[2:]]:
            client.join(PATIENCE)  # its last operation must have ended
        rules = Rules(TIMEOUT, len(self._killed) * THREADS, ALWAYS, {h.name: h.brings for h in HARMS}, GROWTH)
        try:
            operations = [*read(self.folder, self._killed)]
        except ValueError as exc:
            return Outcome([], self._faults, held, [f"the counts do not add up: {exc}"], {})
        violations = self._violations + judge(operations, self._faults, held, rules, self.began)
        if any(said.startswith("grown: server") for said in violations):
            _, before, now = self._sockets
            violations.append(f"grown: of the server's sockets {before} became {now}")
        return Outcome(operations, self._faults, held, violations, summary(operations, self._faults, held, rules))

    def _disturb(self, task: TaskID, share: float, harms: Sequence[Harm]) -> None:
        """Load for a share of the whole time: all faults one after the other in any order, a calm, and so on."""
        end = time.monotonic() + share * self.seconds
        while time.monotonic() < end:
            for harm in self._random.sample(harms, len(harms)):
                self._wait(task, end, self._stage.seconds * (0.5 + self._random.random()), "calm")
                if time.monotonic() < end:
                    self._strike(task, harm)
            self._wait(task, end, 20 * self._stage.seconds, "calm")

    def _strike(self, task: TaskID, harm: Harm) -> None:
        self._progress.update(task, description=harm.name)
        start, struck = time.monotonic(), 0
        try:
            struck = harm.do(self._stage)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self._violations.append(f"{harm.name} at {start - self.began:.1f} s could not be done: {said}")
        end = time.monotonic()
        self._faults.append(Struck(harm.name, start, end, struck))
        self._progress.advance(task, end - start)

    def _wait(self, task: TaskID, end: float, seconds: float, what: str) -> None:
        self._progress.update(task, description=what)
        last = min(end, time.monotonic() + seconds)
        while (left := last - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
            self._progress.advance(task, min(left, 0.5))

    def _rest(self, limit: dict[str, dict[str, float]] | None = None) -> dict[str, dict[str, float]]:
        """All clients stop and close; what is held then, by whom."""
        self._control[0] = PARK
        until_parked(self._control)
        gc.collect()
        takes = {
            "server": lambda: figures.of_server(self.server, 3 * GRACE[self._embedded]),
            "this process": lambda: figures.of_process(os.getpid()),
            "client process": lambda: figures.of_process(self._clients[2].pid),
        }
        found = {who: figures.settled(take, limit[who] if limit else None) for who, take in takes.items()}
        self._sockets.append(figures.sockets(self.server.pid))
        self._control[0] = RUN
        return found

    def _process(self, number: int, name: str) -> Any:
        place = 1 + number * THREADS
        self._control[place : place + THREADS] = [0] * THREADS
        process = self._processes.Process(target=client_process, args=(self._plan, name, self._control, place))
        process.start()
        return process

    def _replace_client(self) -> None:
        process = self._clients[-1]
        process.kill()
        process.join(PATIENCE)
        if process.exitcode != -9:
            self._violations.append(f"the client that was to be killed had ended, with exit code {process.exitcode}")
        process.close()
        number = len(self._killed)
        self._killed.append(self._name(number))
        self._clients[-1] = self._process(CLIENTS - 1, self._name(number + 1))

    def _name(self, number: int) -> str:
        return f"process-{CLIENTS - 1}" + (f"-{number}" if number else "")
