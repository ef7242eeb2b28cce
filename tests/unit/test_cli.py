"""The kvdata command: complete help, honest exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvdata import Prefixes, __version__
from tests.command import kvdata
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv

STEPS = ("HTTP", "version", "mode", "ZMQ", "model", "layout", "packing", "memory")


@pytest.fixture
def prefix_file(connection, tmp_path) -> Path:
    """Two cached prefixes and one that is not."""
    prompts = [fresh_tokens(64) for _ in range(3)]
    with connection.connect() as ctx:
        for prompt in prompts[:2]:
            ctx.store(random_kv(64), prompt)
    path = tmp_path / "prefixes.jsonl"
    Prefixes(Prefixes.of(prompts), LAYOUT, connection.model_name).to_jsonl(path)
    return path


def test_help_lists_every_command_and_each_explains_itself():
    top = kvdata("--help")
    assert top.returncode == 0
    for command in ("serve", "status", "doctor", "ingest", "coverage", "verify", "delete", "snapshot", "evaluate"):
        assert command in top.stdout
        shown = kvdata(command, "--help")
        assert shown.returncode == 0
        options = re.findall(r"--[a-z-]+", shown.stdout)
        assert len(options) > 1
        assert len(shown.stdout.splitlines()) > 5


def test_the_package_is_the_command():
    shown = subprocess.run([sys.executable, "-m", "kvdata", "--version"], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout.strip()) == (0, __version__)


def test_wrong_usage_is_2_and_failure_is_1():
    assert kvdata("status", "--nonsense").returncode == 2
    assert kvdata("coverage", "/does/not/exist").returncode == 2
    gone = kvdata("status", "--http-url", "http://127.0.0.1:1")
    assert gone.returncode == 1
    assert gone.stderr.startswith("ServerUnreachable: GET http://127.0.0.1:1")
    assert "Traceback" not in gone.stderr


def test_status_shows_the_server(embedded, prefix_file):
    shown = kvdata("status", "--http-url", embedded.http_url)
    assert shown.returncode == 0
    assert "0.5.6" in shown.stdout
    assert "32 tokens" in shown.stdout
    assert "unit/model" in shown.stdout


def test_doctor_walks_to_the_first_fault(embedded, prefix_file):
    where = ("doctor", "--http-url", embedded.http_url, "--model-name", "unit/model")
    well = kvdata(*where, "--url", embedded.url)
    assert well.returncode == 0, well.stdout
    steps = [line.split()[:2] for line in well.stdout.splitlines()]
    assert steps == [["ok", s] for s in STEPS] + [["ok", "round"]]
    assert "read back equal" in well.stdout
    wrong_port = kvdata(*where, "--url", "tcp://127.0.0.1:1", "--timeout", "1")
    assert wrong_port.returncode == 1
    assert wrong_port.stdout.splitlines()[-1].split()[:2] == ["FAIL", "ZMQ"]
    assert "--port" in wrong_port.stdout
    unknown = kvdata("doctor", "--http-url", embedded.http_url, "--url", embedded.url, "--model-name", "unit/modle")
    assert unknown.returncode == 1
    assert "did you mean 'unit/model'" in unknown.stdout


def test_delete_what_a_manifest_lists(embedded, connection, prefix_file, tmp_path):
    tokens, salt = fresh_tokens(64), "~random.64-r1-0123456789abcdef"
    with connection.connect() as ctx:
        ctx.store(random_kv(64), tokens, salt)
    line = {"source": "0123456789abcdef", "source_tokens": 128, "tokens": tokens, "salt": salt, "policy": "random"}
    (tmp_path / "manifest.jsonl").write_text(json.dumps({**line, "revision": "r1", "bytes": 1}) + "\n")
    where = ("--url", embedded.url, "--http-url", embedded.http_url, "--model-name", "unit/model")
    gone = kvdata("delete", "--manifest", str(tmp_path / "manifest.jsonl"), *where)
    assert (gone.returncode, gone.stdout.strip()) == (0, "2 chunks deleted")
    assert kvdata("delete", *where).returncode == 2
    assert kvdata("delete", str(prefix_file), "--manifest", str(tmp_path / "manifest.jsonl"), *where).returncode == 2


def test_coverage_and_delete(embedded, prefix_file):
    where = (str(prefix_file), "--url", embedded.url, "--http-url", embedded.http_url)
    found = kvdata("coverage", *where)
    assert (found.returncode, found.stdout.strip()) == (3, "2 of 3 cached, 0 partly, 1 missing")
    gone = kvdata("delete", *where)
    assert (gone.returncode, gone.stdout.strip()) == (0, "4 chunks deleted")
    assert kvdata("coverage", *where).stdout.strip() == "0 of 3 cached, 0 partly, 3 missing"
    lines = prefix_file.read_text().splitlines()
    prefix_file.write_text(json.dumps({**json.loads(lines[0]), "model_name": None}) + "\n" + lines[1] + "\n")
    assert kvdata("delete", *where).returncode == 2
