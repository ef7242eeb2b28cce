"""The table in the documentation adds up over runs, and only failures can worsen a test's outcome."""

from __future__ import annotations

import pytest

from tests.conformance.compatibility import BEGIN, END, Table, update

NEW = ("LMCache", "0.5.10", "shm", "any")
OLD = ("LMCache", "0.5.9", "pickle", "split")


def test_a_failed_check_after_a_passed_test_is_a_failed_test():
    table = Table()
    for test, outcome in (("a", "passed"), ("a", "failed"), ("b", "passed"), ("c", "skipped")):
        table.add(NEW, test, outcome)
    assert table.counts() == {NEW: (1, 1, 1)}


def test_runs_on_other_servers_keep_their_rows(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\n{END}\n\nafter\n")
    update(page, {OLD: (3, 0, 0)})
    update(page, {NEW: (5, 1, 0)})
    update(page, {NEW: (6, 0, 0), ("embedded", "0.5.6", "shm", "fused"): (2, 0, 1)})
    assert page.read_text() == (
        f"before\n\n{BEGIN}\n\n"
        "| server   | version | transport | layout | passed | failed | skipped |\n"
        "| -------- | ------- | --------- | ------ | ------ | ------ | ------- |\n"
        "| embedded | 0.5.6   | shm       | fused  | 2      | 0      | 1       |\n"
        "| LMCache  | 0.5.10  | shm       | any    | 6      | 0      | 0       |\n"
        "| LMCache  | 0.5.9   | pickle    | split  | 3      | 0      | 0       |\n"
        f"\n{END}\n\nafter\n"
    )


def test_a_page_without_a_place_for_the_table_is_an_error(tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(ValueError, match="no table between"):
        update(tmp_path / "page.md", {})
