"""The soak in short, and that it can fail: each rule of it, broken."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from kvdata import Connection, KVCacheContext
from tests.conformance.conftest import random_kv
from tests.faults.checks import LAYOUT, MODEL, PATIENCE
from tests.faults.soak import figures, load
from tests.faults.soak.harm import ALWAYS, HARMS
from tests.faults.soak.judge import Rules, judge
from tests.faults.soak.records import KILLED, LOST, Held, Journal, Operation, Struck, read

RULES = Rules(3.0, 1, ALWAYS, {harm.name: harm.brings for harm in HARMS}, {figures.MEMORY: 32.0})
LONGEST = RULES.longest
GOOD = Operation("a", "retrieve", 100.0, 100.5, "ok")
LATE = Operation("a", "store", 200.0, 203.0, "ServerTimeout", "store: no answer from ...")
FROZEN = Struck("server stopped (SIGSTOP)", 199.0, 200.5, 1)
SAME = {figures.MEMORY: 100.0, "descriptors": 20.0, "read locks": 0.0}
HELD = Held("server", SAME, SAME)


def test_twelve_seconds(tmp_path):
    """All operations and faults, on the embedded server, in a process of its own."""
    command = [sys.executable, "-m", "tests.faults.soak", "--minutes", "0.2", "--seed", "5"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "figures")], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "figures").read_text())
    for kind, counts in found["operations"].items():
        assert counts["outcomes"].get("ok", 0) + counts["outcomes"].get("partial", 0) > 0, kind
        assert counts["count"] == sum(counts["outcomes"].values())
    assert sum(fault["struck"] > 0 for fault in found["faults"].values()) >= 5
    assert "0 wrong tensors, 0 hangs, 0 leaks" in done.stdout


def test_what_is_allowed():
    """An error that a fault explains, the load's own, what was cut off with a killed client, and a little growth."""
    conflict = replace(LATE, start=900.0, end=901.0, outcome="StoreConflict")
    killed = Operation("a", "store", 300.0, None, KILLED)
    more = Held("server", SAME, {**SAME, figures.MEMORY: 131.0})
    assert judge([GOOD, LATE, conflict, killed], [FROZEN], [HELD, more], RULES, 0.0) == []


BROKEN = {
    "wrong tensor": [replace(GOOD, outcome="wrong")],
    "ended in nothing": [replace(GOOD, end=None, outcome=LOST)],
    "hung": [replace(GOOD, end=GOOD.start + LONGEST + 0.1)],
    "cut off": [replace(GOOD, end=None, outcome=KILLED)] * 2,
    "does not say what it must": [replace(LATE, complaint="no URL in 'store: no answer'")],
    "unexpected error": [replace(LATE, outcome="ProtocolError")],  # a server that stands still does not bring that
    "no fault near": [replace(LATE, start=FROZEN.end + LONGEST + 0.1, end=FROZEN.end + LONGEST + 3)],
    "foreign": [replace(LATE, outcome="KeyError")],
}


@pytest.mark.parametrize("rule", BROKEN)
def test_an_operation_that_breaks_a_rule(rule):
    said = judge([GOOD, *BROKEN[rule]], [FROZEN], [HELD], RULES, 0.0)
    assert len(said) == 1
    assert ("unexpected error" if rule in ("no fault near", "foreign") else rule) in said[0]


@pytest.mark.parametrize("name", SAME)
def test_growth(name):
    grown = Held("server", SAME, {**SAME, name: SAME[name] + RULES.growth.get(name, 0) + 1})
    (said,) = judge([GOOD], [], [grown], RULES, 0.0)
    assert name in said


def test_a_soak_in_which_nothing_ever_worked():
    (said,) = judge([replace(LATE, start=200.0)], [FROZEN], [HELD], RULES, 0.0)
    assert "proves nothing" in said


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 7, 63, 511)], ids=["first", "last"])
def test_a_tensor_with_one_wrong_number(place):
    wanted = random_kv(64, LAYOUT)
    found = wanted.clone()
    assert load.compared(found, wanted) == "ok"
    assert load.compared(found[:, :, :32], wanted) == "partial"
    found[place] += 1
    assert load.compared(found, wanted) == "wrong"
    assert load.together(["ok", "wrong", "miss"]) == "wrong"


def test_the_caches_of_two_prompts_are_nowhere_the_same():
    """One that is another's, in the soak, is never taken for the right one."""
    caches = [load.content(document, salt)[1] for document in range(load.DOCUMENTS) for salt in load.SALTS]
    chunks = [cache[:, :, start : start + 64] for cache in caches for start in range(0, 256, 64)]
    assert len({chunk.contiguous().view(torch.int16).numpy().tobytes() for chunk in chunks}) == len(chunks)


def test_a_leaked_descriptor_a_socket_and_a_thread_are_seen():
    before, known = figures.of_process(os.getpid()), figures.sockets(os.getpid())
    reader, writer = os.pipe()
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    now, shown = figures.of_process(os.getpid()), figures.sockets(os.getpid())
    stop.set()
    thread.join()
    os.close(reader)
    os.close(writer)
    port = listener.getsockname()[1]
    listener.close()
    assert now["descriptors"] == before["descriptors"] + 3
    assert now["sockets"] == before["sockets"] + 1
    assert [*set(shown) - set(known)] == [f"SOCK_STREAM LISTEN 127.0.0.1:{port}"]
    assert now["threads"] == before["threads"] + 1


def test_what_a_client_left_is_seen(server, no_leaks):
    with Connection(server.url, server.http_url, MODEL, PATIENCE, LAYOUT).connect() as ctx:
        ctx.store(random_kv(64, LAYOUT), list(range(64)))
        with ctx.lease(list(range(64))):
            found = figures.of_server(server, 0.0)
        assert (found["read locks"], found["registrations"]) == (1, 1)
        ctx.delete(list(range(64)))
    found = figures.of_server(server, PATIENCE)
    assert {found[name] for name in ("read locks", "reservations", "sessions", "registrations")} == {0}


def test_journals(tmp_path):
    """Each operation comes out once, and one that did not end as such."""
    journal = Journal(tmp_path / "a.0.jsonl")
    journal.begins("store")
    journal.ended(2e9, "ok")
    journal.begins("lookup")
    journal.close()
    first, second = read(tmp_path, ["a"])
    assert (first.kind, first.outcome, second.kind, second.outcome) == ("store", "ok", "lookup", KILLED)
    assert [*read(tmp_path, [])][1].outcome == LOST


@pytest.mark.parametrize("twice", ["begins", "ended"])
def test_a_journal_that_does_not_add_up(tmp_path, twice):
    journal = Journal(tmp_path / "a.0.jsonl")
    for call in ("begins", "ended") if twice == "ended" else ("begins",):
        for _ in range(1 + (call == twice)):
            journal.begins("store") if call == "begins" else journal.ended(2e9, "ok")
    journal.close()
    with pytest.raises(ValueError, match="does not follow"):
        [*read(tmp_path, [])]


def test_an_error_of_another_kind_is_complained_of(tmp_path):
    """A client that raises what is no error of kvdata's, and one whose error says nothing."""
    plan = load.Plan(Connection("tcp://127.0.0.1:1", "http://127.0.0.1:1", MODEL, 1.0, LAYOUT), 0, tmp_path)
    client = load.Client(plan, "a")
    worker = load.Worker(client, 0, [load.RUN, 0], 1)
    assert not worker._complaint(_error(worker.client.context), "lookup")
    assert "no URL" in worker._complaint(type(_error(worker.client.context))("lookup: retry"), "lookup")
    assert "KeyError" in worker._complaint(KeyError("lookup"), "lookup")
    worker._journal.close()
    client.context.close()


def _error(ctx: KVCacheContext) -> Exception:
    try:
        ctx.lookup(list(range(64)))
    except Exception as error:
        return error
    raise AssertionError("nobody listens there")
