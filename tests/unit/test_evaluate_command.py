"""``kvdata evaluate`` as a whole, on a tiny model: reports, going on after an interruption, other people's folders."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvdata import Connection, Prefixes
from kvdata.cli import app
from kvdata.edits.policies import KeyDiff, apply_policy
from kvdata.edits.rope import Rope
from kvdata.errors import OtherEvaluation, OtherSource
from kvdata.evaluation.measure import Reference
from kvdata.models.cartridge import Cartridge
from kvdata.models.token_scorer import TokenScorer
from tests.unit.tiny_model import tiny_autoencoder, tiny_engine, tiny_folder, windows

TOKENS, POLICIES = 256, ("random", "keydiff", "oracle")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prefixes(embedded, tmp_path_factory) -> Path:
    """Four cached windows of two documents."""
    engine = tiny_engine()
    records = Prefixes(Prefixes.of(windows(4, TOKENS, 24, 5)), engine.layout, "unit/model")
    with Connection(embedded.url, embedded.http_url, "unit/model", layout=engine.layout).connect() as ctx:
        for record in records:
            engine.store_prefix(ctx, record.tokens)
    path = tmp_path_factory.mktemp("prefixes") / "prefixes.jsonl"
    records.to_jsonl(path)
    return path


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("scorer") / "my-scorer.pt"
    TokenScorer(3, 2, 4, 8, Rope.from_config(tiny_engine().config), width=8).save(path)
    return path


@pytest.fixture
def run(embedded, model, prefixes, scorer, tmp_path):
    """The command into ``tmp_path / "out"``; its result as typer's runner gives it."""

    def call(*options: str, file: Path = prefixes):
        arguments = ["evaluate", str(file), "--model", str(model), "--out", str(tmp_path / "out")]
        arguments += ["--policies", ",".join(POLICIES), "--scorer", str(scorer), "--passkey", "1", "--dtype", "float32"]
        where = ["--url", embedded.url, "--http-url", embedded.http_url]
        return CliRunner().invoke(app, [*arguments, *where, *options])

    return call


def test_the_reports_say_what_was_measured(run, tmp_path):
    done = run()
    assert done.exit_code == 0, done.output
    *table, last = done.stdout.splitlines()
    assert max(map(len, table)) <= 80
    assert last.startswith("open ")
    assert "…" not in done.stdout
    for name in ("sees the cache", "sees the answer", "*my-scorer", "keep 0.25"):
        assert name in done.stdout

    out = tmp_path / "out"
    report = json.loads((out / "report.json").read_text())
    names = {*POLICIES, "my-scorer"}
    found = {(r["policy"], r["keep"]): r for r in report["results"]}
    assert set(found) == {("full", 1.0)} | {(name, keep) for name in names for keep in (0.5, 0.25)}
    assert [found["my-scorer", 0.25][key] for key in ("kept_tokens", "windows", "trained")] == [64, 4, True]
    assert found["keydiff", 0.5]["passkey"]["prompts"] == 5
    assert found["oracle", 0.5]["sees"] == "future"
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    full = {r["window"]: r["nll"]["next"] for r in rows if r["policy"] == "full"}
    deltas = [r["nll"]["next"] - full[r["window"]] for r in rows if (r["policy"], r["keep"]) == ("keydiff", 0.5)]
    assert len(deltas) == 4
    assert found["keydiff", 0.5]["delta_nll"] == pytest.approx(sum(deltas) / 4)
    assert found["keydiff", 0.5]["ci90"][0] <= found["keydiff", 0.5]["delta_nll"] <= found["keydiff", 0.5]["ci90"][1]
    assert {c["rival"] for c in report["comparisons"]} <= {"random", "keydiff"}

    with open(out / "report.csv", newline="") as file:
        table = {(line["policy"], float(line["keep"])): line for line in csv.DictReader(file)}
    assert set(table) == set(found)
    assert float(table["keydiff", 0.5]["delta_nll"]) == found["keydiff", 0.5]["delta_nll"]
    assert table["keydiff", 0.5]["passkey_prompts"] == "5"
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_an_autoencoder_stands_beside_the_policies(run, tmp_path):
    model = tiny_autoencoder(tiny_engine())
    model.save(tmp_path / "coded.pt")
    share = round(model.ratio(TOKENS), 2)
    done = run("--autoencoder", str(tmp_path / "coded.pt"), "--limit", "2", "--keep", f"{share},0.25")
    assert done.exit_code == 0, done.output
    assert "*coded" in done.stdout
    assert f"keep {share:g}: 160 tokens" in done.stdout
    found = {(r["policy"], r["keep"]): r for r in json.loads((tmp_path / "out/report.json").read_text())["results"]}
    assert ("coded", 0.25) not in found
    assert [found["coded", share][key] for key in ("kept_tokens", "windows", "trained")] == [TOKENS, 2, True]
    assert found["coded", share]["kl"] < found["keydiff", share]["kl"]


def test_cartridges_stand_beside_the_policies_for_their_documents(run, prefixes, tmp_path):
    engine, files = tiny_engine(), []
    rope, records = Rope.from_config(engine.config), Prefixes.from_jsonl(prefixes)
    for number, slots in enumerate((64, 64, 48)):
        ids = records[number].tokens.tolist()
        model = Cartridge(3, 2, 8, slots)
        model.begin(apply_policy(KeyDiff(), engine.prefill(ids), slots, rope, 2)[0], ids)
        files.append(tmp_path / f"best-{number}.pt")
        model.save(files[-1])
    first, second, shorter = (("--cartridge", str(file)) for file in files)
    rows = tmp_path / "out/rows.jsonl"
    done = run(*first, *second, "--limit", "3")
    assert isinstance(done.exception, OtherSource)  # before anything is measured
    assert not rows.exists() or not rows.read_text()
    assert "of 48 and [64] slots" in str(run(*first, *shorter).exception)
    assert "same document" in str(run(*first, *first).exception)

    done = run(*first, *second, "--limit", "2")
    assert done.exit_code == 0, done.output
    assert "*cartridge" in done.stdout
    found = {(r["policy"], r["keep"]): r for r in json.loads((tmp_path / "out/report.json").read_text())["results"]}
    assert ("cartridge", 0.5) not in found
    own, same = found["cartridge", 0.25], found["keydiff", 0.25]
    assert [own[key] for key in ("kept_tokens", "windows", "trained", "passkey")] == [64, 2, True, None]
    assert own["delta_nll"] == pytest.approx(same["delta_nll"], abs=1e-3)  # untrained, it is what it began as
    assert same["passkey"]["prompts"] == 5


def test_the_page_needs_no_network_and_escapes_texts(run, tmp_path):
    assert run("--limit", "2").exit_code == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "plotly.js v" in page[:5000]  # the library itself
    assert "<script src" not in page
    assert "<link" not in page
    own = page[page.index("<body>") :]
    assert "document &lt;0&gt;" in own
    for words in ("Passkey", "Attention outputs", "Worst windows", "my-scorer (trained)", "2 from 2 documents"):
        assert words in own
    assert "Through the serving engine" not in own
    assert own.count("Plotly.newPlot") == 7


def test_after_an_interruption_the_rest_is_done(run, tmp_path, monkeypatch):
    measure, calls = Reference.rows, []

    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Reference, "rows", interrupted)
        assert run().exit_code != 0
    rows = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert len(rows.splitlines()) == 2 + 3 * 4  # two full caches, three groups of four
    assert not (tmp_path / "out" / "report.html").exists()
    assert run().exit_code == 0
    after = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert after.startswith(rows)
    assert len(after.splitlines()) == 4 * (1 + 4 * 2)
    passkey = (tmp_path / "out" / "passkey.jsonl").read_bytes()
    assert run("--policies", "keydiff").exit_code == 0  # less of it: nothing is measured again
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == after
    assert (tmp_path / "out" / "passkey.jsonl").read_bytes() == passkey
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {r["policy"] for r in report["results"]} == {"full", "keydiff", "my-scorer"}


def test_another_runs_folder_is_refused(run, tmp_path):
    assert run("--limit", "1", "--passkey", "0").exit_code == 0
    kept = (tmp_path / "out" / "rows.jsonl").read_bytes()
    other = tmp_path / "other.jsonl"
    Prefixes(Prefixes.of(windows(1, TOKENS, 24, 6)), tiny_engine().layout, "unit/model").to_jsonl(other)
    for options, file, words in (((), other, "windows_blake3"), (("--dtype", "bfloat16"), None, "dtype")):
        done = run(*options, **({"file": file} if file else {}))
        assert isinstance(done.exception, OtherEvaluation)
        assert words in str(done.exception)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == kept


def test_what_is_not_cached_is_exit_code_3(run, tmp_path):
    absent = tmp_path / "absent.jsonl"
    Prefixes(Prefixes.of(windows(1, TOKENS, 24, 77)), tiny_engine().layout, "unit/model").to_jsonl(absent)
    done = run(file=absent)
    assert done.exit_code == 3
    assert "MissingKV" in done.output
    assert run("--keep", "half").exit_code == 2
