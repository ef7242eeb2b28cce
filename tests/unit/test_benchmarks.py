"""The benchmarks' rows at tiny sizes: what they measure exists and is reported. How fast it is, nobody asks here."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from benchmarks import report
from benchmarks.__main__ import measure
from benchmarks.figures import FIGURES
from benchmarks.growth import held
from benchmarks.memory import MEMORY
from benchmarks.rows import ROWS
from benchmarks.stack import Sizes, Stack, running
from kvdata import KVLayout, Prefixes

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16)
TINY = Sizes(LAYOUT, chunk=32, prefix=64, samples=4, sample=64, lookups=4, pool_mb=16)
KEYS = {"name", "ours", "upstream", "limit", "unit", "vs_upstream", "vs_limit", "server"}
GROWN = ["chunks_4", "ranks_2", "prefixes_1e2"]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running("embedded", TINY, with_upstream=False) as running_stack:
        yield running_stack


@pytest.mark.parametrize("name", [*ROWS, *FIGURES, *MEMORY, *GROWN])
def test_a_row_has_every_field_and_positive_figures(stack, name):
    (row,) = measure(stack, [name], 1)
    assert set(row) == KEYS
    assert (row["name"], row["server"], row["upstream"]) == (name, "embedded", None)
    assert row["ours"] > 0
    if name in ROWS:
        assert row["vs_limit"] == pytest.approx(row["ours"] / row["limit"], rel=2e-3)  # each rounded to 4 digits


def test_the_report_has_every_row_and_names_the_missed_marks(tmp_path):
    common = {"unit": "GB/s", "limit": 10.0, "server": "lmcache"}
    rows = [
        {"name": "retrieve", "ours": 9.0, "upstream": 2.0, "vs_upstream": 4.5, "vs_limit": 0.9, **common},
        {"name": "one_layer", "ours": 1.0, "upstream": 0.5, "vs_upstream": 2.0, "vs_limit": 0.1, **common},
    ]
    report.write(rows, "make bench", 0.0, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == rows
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| retrieve | 9 | 2 | 10 | GB/s | 4.5 (3) | 0.9 (0.75) |" in page
    assert "| one_layer | 1 | 0.5 | 10 | GB/s | **2** (20: missed) | 0.1 |" in page
    assert (tmp_path / "results.png").stat().st_size > 1000


def test_what_prefixes_hold_is_counted_to_the_last_array():
    assert 4000 < held(Prefixes.of([list(range(1000))])) < 6000  # 4 bytes a token, and what a record costs
