"""A real LMCache server and a real vLLM as processes, on free ports, each with a log below ``runs/live``.

``python -m tests.live.stack demo ...`` runs the demo on a real LMCache server of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from kvdata.engines.smollm2 import smollm2_folder
from kvdata.wire.shm import SHM_FOLDER
from tests.live.environments import ROOT, command
from tests.servers import Server, answers, free_port

LOGS = ROOT / "runs" / "live"
CHUNK = 128
# vLLM lays bfloat16 caches out for the AMX unit where the CPU has one, and publishes the same format: kvdata's verify
# tells which.
DTYPE = "bfloat16"
SERVED_NAME = "smol"
VLLM_READY_SECONDS = 300.0
STOP_SECONDS = 30.0


@contextmanager
def lmcache(
    chunk_size: int = CHUNK,
    pool_mb: int = 1024,
    flags: Sequence[str] = (),
    name: str = "lmcache",
) -> Iterator[Server]:
    """LMCache's server, in shared memory; its pool is gone afterwards, however it ended.

    On one OpenMP thread: it copies an engine's blocks in many small parallel operations, whose threads wait for each
    other beside an engine on the same cores. On 2 of them, 3,000 tokens of SmolLM2-135M took 1 to 4 s to retrieve,
    and 0.16 s with one thread.
    """
    environment = {"OMP_NUM_THREADS": "1"}
    server = Server(str(command("lmcache")), "shm", chunk_size, pool_mb, flags, _fresh_log(name), environment)
    try:
        yield server.start()
    finally:
        try:
            server.stop()
        finally:
            server.pool.unlink(missing_ok=True)


class VLLM:
    """``vllm serve`` on the CPU with SmolLM2-135M, reading from and writing to an LMCache server.

    Args:
        server: the running LMCache server.
        name: of its log.
        flags: more of its own options.
    """

    def __init__(self, server: Server, name: str = "vllm", flags: Sequence[str] = ()) -> None:
        self.model = str(smollm2_folder())
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = _fresh_log(name)
        self._connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.port": int(server.url.rpartition(":")[2])},
        }
        self._flags = tuple(flags)
        self._process: subprocess.Popen[bytes] | None = None
        self._pids: set[int] = set()

    def start(self) -> VLLM:
        """Start it and wait until it serves; `RuntimeError` with the end of its log when it does not."""
        vllm = command("vllm")
        environment = {
            **os.environ,
            "PATH": f"{vllm.parent}{os.pathsep}{os.environ.get('PATH', '')}",  # it calls ninja and the like
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven",
        }
        arguments = ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]]
        arguments += ["--enforce-eager", "--max-model-len", "4096", "--dtype", DTYPE, "--no-enable-prefix-caching"]
        arguments += ["--return-tokens-as-token-ids", "--kv-transfer-config", json.dumps(self._connector)]
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [str(vllm), "serve", self.model, *arguments, *self._flags],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # a group of its own, so that its workers can be ended with it
            )
        deadline = time.monotonic() + VLLM_READY_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            self._pids |= _group(self._process.pid)
            if answers(self.url + "/health"):
                return self
            time.sleep(0.2)
        state = "is not ready in time" if self._process.poll() is None else f"ended ({self._process.returncode})"
        self.stop()
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(f"vLLM {state}; the end of {self.log}:\n{tail}")

    def stop(self) -> None:
        """End it and all processes of its group, and remove what these left in shared memory."""
        if self._process is None:
            return
        group = self._process.pid
        self._pids |= _group(group)
        names = self.shared_memory()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        deadline = time.monotonic() + STOP_SECONDS
        # Its workers and the process that cleans up after them end a moment after it, if they are left alone.
        while _group(group) and time.monotonic() < deadline - STOP_SECONDS / 2:
            time.sleep(0.05)
        while _group(group) and time.monotonic() < deadline:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.poll()
            time.sleep(0.05)
        self._process.wait(STOP_SECONDS)
        self._process = None
        for pid in self._pids:
            names.update(SHM_FOLDER.glob(f"lmcache_kv_{pid}_*"))
        for left in names:
            left.unlink(missing_ok=True)

    def shared_memory(self) -> set[Path]:
        """Names in shared memory that its processes have mapped now."""
        return _shared_memory(_group(self._process.pid)) if self._process else set()

    def logprob(self, prompt: list[int], token: int) -> float:
        """Log-probability of one token after a prompt, in nats; the prompt's cache is read from LMCache."""
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "logprobs": 1, "allowed_token_ids": [token]}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120, trust_env=False)
        answer.raise_for_status()
        return float(answer.json()["choices"][0]["logprobs"]["token_logprobs"][0])

    def complete(self, prompt: list[int], max_tokens: int = 24, **options: Any) -> list[int]:
        """Token ids of the greedy continuation of a prompt of token ids."""
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json={**body, **options}, timeout=120, trust_env=False)
        answer.raise_for_status()
        return [int(token.removeprefix("token_id:")) for token in answer.json()["choices"][0]["logprobs"]["tokens"]]


@contextmanager
def vllm(server: Server, name: str = "vllm", flags: Sequence[str] = ()) -> Iterator[VLLM]:
    """A running `VLLM`, ended afterwards; stopping it earlier is fine."""
    engine = VLLM(server, name, flags)
    try:
        yield engine.start()
    finally:
        engine.stop()


def _shared_memory(pids: set[int]) -> set[Path]:
    """Names in shared memory that these processes have mapped; not the server's pool, which is the server's."""
    names: set[Path] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:  # it has ended
            continue
        names.update(Path(line.split(maxsplit=5)[5]) for line in maps if f" {SHM_FOLDER}/" in line)
    return {name for name in names if not name.name.startswith("lmcache_l1_pool_")}


def _group(pgid: int) -> set[int]:
    """Processes of a group that have not ended."""
    members: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # state, parent, group, ...
        except (OSError, ValueError):
            continue
        if int(fields[2]) == pgid and fields[0] not in "ZX":
            members.add(int(stat.parent.name))
    return members


def _fresh_log(name: str) -> Path:
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name}.log"
    log.unlink(missing_ok=True)
    return log


def _demo(arguments: Sequence[str]) -> int:
    """The demo on a real LMCache server of its own."""
    from training.demo import CHUNK as DEMO_CHUNK
    from training.demo import POOL_GB

    with lmcache(DEMO_CHUNK, int(POOL_GB * 1024), name="demo-lmcache") as server:
        demo = [sys.executable, "-m", "training.demo", "--url", server.url, "--http-url", server.http_url, *arguments]
        return subprocess.run(demo, check=False).returncode


if __name__ == "__main__":
    if sys.argv[1:2] != ["demo"]:
        sys.exit("usage: python -m tests.live.stack demo [the demo's options]")
    sys.exit(_demo(sys.argv[2:]))
