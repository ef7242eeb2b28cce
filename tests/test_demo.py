"""``make demo`` in small: the same path from text to report, on fewer windows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(400)
def test_the_demo_runs_twice_into_one_folder_and_its_counters_add_up(tmp_path):
    command = [sys.executable, "-m", "training.demo", "--out", str(tmp_path / "out")]
    command += ["--train", "4", "--held-out", "2", "--epochs", "1"]
    before = set(Path("/dev/shm").glob("lmcache_l1_pool_kvdata-[0-9]*"))
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {(r["policy"], r["keep"]): r for r in report["results"]}
    assert set(rows) == {
        ("full", 1.0),
        *((p, k) for p in ("random", "recency", "key-norm", "keydiff", "learned", "oracle") for k in (0.5, 0.25)),
    }
    windows, trained = report["windows"], report["training_windows"]
    chunk = report["chunk_tokens"]
    stored = (windows + trained) * report["context_tokens"] // chunk
    stored += sum(windows * r["kept_tokens"] // chunk for r in rows.values() if r["policy"] != "full")
    assert report["server"]["stored_chunks"] == stored
    assert report["server"]["retrieved_chunks"] == report["expected"]["retrieved_chunks"] > stored
    assert rows["full", 1.0]["delta_nll"] == 0
    assert rows["full", 1.0]["stored_bytes"] == windows * 512 * 23040
    assert rows["keydiff", 0.25]["kept_tokens"] == 128
    assert rows["learned", 0.5]["trained"]
    assert rows["oracle", 0.5]["sees"] == "future"
    assert rows["oracle", 0.25]["kl"] < rows["random", 0.25]["kl"]
    assert (tmp_path / "out" / "report.png").stat().st_size > 10_000
    assert len((tmp_path / "out" / "manifest.jsonl").read_text().splitlines()) == 12 * windows
    assert (tmp_path / "out" / "logs" / "metrics.csv").exists()
    assert set(Path("/dev/shm").glob("lmcache_l1_pool_kvdata-[0-9]*")) <= before
