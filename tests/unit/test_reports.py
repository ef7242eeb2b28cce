"""Tables, files and the page, of made-up rows."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kvdata import Prefixes
from kvdata.edits.policies import Sees
from kvdata.evaluation import (
    LiveResult,
    PasskeyRow,
    Row,
    comparisons,
    print_costs,
    print_live,
    print_results,
    save_html,
    save_json,
    save_plot,
    summarise,
)
from kvdata.evaluation.report.documents import by_document, worst_windows
from kvdata.evaluation.report.plots import styles

POLICIES = {
    "keydiff": (0.10, "cache", False),
    "recency": (0.20, "cache", False),
    "expected-attention": (0.08, "queries", False),
    "learned": (0.05, "cache", True),
    "oracle": (-0.01, "future", False),
}


def rows() -> list[Row]:
    def row(window: int, policy: str, keep: float, delta: float, sees: str = "cache", trained: bool = False) -> Row:
        return Row(
            window=window,
            policy=policy,
            revision="r1",
            keep=keep,
            kept_tokens=int(1024 * keep),
            sees=sees,
            trained=trained,
            stored_bytes=int(1e6 * keep),
            nll={"next": 2 + window + delta, "recall 25 %": 1 + delta},
            kl={"next": 0.1, "recall 25 %": 0.2},
            top1={"next": 0.9, "recall 25 %": 0.8},
            attention_error=abs(delta),
            seconds={"inputs": 0.5, "score": 0.01, "write": 0.02, "read": 0.03 + window},
        )

    found = [row(window, "full", 1.0, 0.0) for window in range(3)]
    for policy, (delta, sees, trained) in POLICIES.items():
        for keep in (0.5, 0.25):
            increase = delta / keep / 2
            found += [row(w, policy, keep, increase * (1 + 0.1 * w), sees, trained) for w in range(3)]
    return found


def passkey_rows() -> list[PasskeyRow]:
    about = {"revision": "r1", "kept_tokens": 512}
    return [
        PasskeyRow(window=i, policy="keydiff", keep=0.5, depth=(0.1, 0.9)[i % 2], found=i % 4 != 0, **about)
        for i in range(8)
    ]


def test_results_are_means_over_windows_paired_with_the_full_cache():
    found = {(r.policy, r.keep): r for r in summarise(rows(), passkey_rows())}
    assert next(iter(found)) == ("full", 1.0)
    keydiff = found["keydiff", 0.5]
    assert keydiff.delta_nll == pytest.approx(0.11)
    assert keydiff.nll == pytest.approx(3.11)
    assert 0.10 <= keydiff.ci90[0] < 0.11 < keydiff.ci90[1] <= 0.12
    assert keydiff.recall["recall 25 %"].delta_nll == pytest.approx(0.11)
    assert (keydiff.stored_bytes, keydiff.windows, keydiff.kept_tokens) == (1_500_000, 3, 512)
    assert keydiff.seconds["read"] == pytest.approx(1.03)  # the median
    assert (keydiff.passkey.found, keydiff.passkey.prompts) == (6, 8)
    assert keydiff.passkey.by_depth == {0.1: 0.5, 0.9: 1.0}
    assert found["recency", 0.5].passkey is None


def test_trained_policies_are_compared_with_the_best_of_each_kind():
    found = {(c.policy, c.keep, c.sees): c for c in comparisons(rows())}
    assert set(found) == {("learned", keep, sees) for keep in (0.5, 0.25) for sees in (Sees.CACHE, Sees.QUERIES)}
    cache, queries = found["learned", 0.5, Sees.CACHE], found["learned", 0.5, Sees.QUERIES]
    assert (cache.rival, cache.ratio) == ("keydiff", pytest.approx(0.5))
    assert cache.ci90 == pytest.approx((0.5, 0.5))
    assert (queries.rival, queries.ratio) == ("expected-attention", pytest.approx(0.625))
    lossless = [r for r in rows() if r.policy in ("full", "learned", "oracle")]
    lossless += [
        Row(
            **{name: getattr(r, name) for name in r.__struct_fields__}
            | {"policy": "free", "trained": False, "nll": full}
        )
        for r in rows()
        if r.policy == "learned" and (full := {"next": 2.0 + r.window, "recall 25 %": 1.0})
    ]
    assert {(c.rival, c.ratio, c.ci90) for c in comparisons(lossless)} == {("free", None, (None, None))}
    json.dumps([c.to_dict() for c in comparisons(lossless)], allow_nan=False)


def test_tables_fit_80_columns_and_keep_kinds_apart():
    console = Console(width=80, record=True, file=io.StringIO())
    results = summarise(rows(), passkey_rows())
    print_results(results, comparisons(rows()), console, "title")
    print_costs(results, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    half = text[text.index("keep 0.5:") : text.index("keep 0.25:")]
    order = ["sees the cache", "*learned", "keydiff", "recency", "sees queries too", "expected", "sees the answer"]
    places = [half.index(words) for words in order]
    assert places == sorted(places)
    line = next(line for line in half.splitlines() if "*learned" in line).split()
    assert line[1:3] == ["3.055", "+0.055"]
    assert "learned / best untrained that sees only the cache (keydiff):" in text


def test_live_results_name_what_was_not_read():
    def result(policy: str, read: int) -> LiveResult:
        return LiveResult(
            policy, 0.5, 8, 128, 2.5, 0.1, (0.0, 0.2), 0.1, (0, 0), read, 512, True, Sees.CACHE, 90.0, 1.5
        )

    assert result("a", 512).all_hits
    assert not result("a", 511).all_hits
    console = Console(width=100, record=True, file=io.StringIO())
    print_live([result("expected-attention", 512)], console, "live")
    shown = console.export_text()
    assert "1.50x" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_worst_cases_by_document_and_window(tmp_path):
    records = Prefixes.of(
        {"tokens": [1, 2], "continuation": [3 + i], "meta": {"name": name}} for i, name in enumerate(["a", "b", "b"])
    )
    first, second = by_document(rows(), records)
    assert (first.name, first.windows, second.name, second.windows) == ("b", 2, "a", 1)
    assert second.delta_nll["keydiff", 0.5] == pytest.approx(0.10)
    worst = [w for w in worst_windows(rows(), records, str) if (w.policy, w.keep) == ("keydiff", 0.5)]
    assert [(w.window, w.document) for w in worst] == [(2, "b"), (1, "b"), (0, "a")]
    assert (worst[0].before, worst[0].after) == ("[1, 2]", "[5]")
    results = summarise(rows())
    live = [LiveResult("full", 1.0, 8, 128, 2.5, 0.0, (0, 0), 0.0, (0, 0), 9, 9, False, Sees.CACHE)]
    path = tmp_path / "new" / "report.html"
    save_html(path, "t<i>tle", {"model": "m"}, results, [], rows(), records, lambda ids: f"<b>{ids}</b>", live)
    page = path.read_text()
    assert "t&lt;i&gt;tle" in page
    assert "&lt;b&gt;[5]&lt;/b&gt;" in page
    assert "Through the serving engine" in page
    assert "<h2>Passkey</h2>" not in page


def test_plot_and_json_are_written(tmp_path):
    results = summarise(rows(), passkey_rows())
    save_plot(results, tmp_path / "new" / "report.png", "title")
    assert (tmp_path / "new" / "report.png").read_bytes().startswith(b"\x89PNG")
    looks = styles(results)
    assert len(set(looks.values())) == len(looks)
    save_json({"results": results, "model": "m"}, tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())["results"]
    assert found[0]["policy"] == "full"
    assert found[0]["sees"] == "cache"
