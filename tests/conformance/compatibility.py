"""The conformance table: what the suite found, by server, version, transport and layout."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from kvdata.layout import PACKINGS

Row = tuple[str, ...]  # server, version, transport, layout

HEAD = ("server", "version", "transport", "layout", "passed", "failed", "skipped")
BEGIN = "<!-- written by `make conformance` -->"
END = "<!-- until here -->"
ANY = "any"  # the layout of tests that are about something else
_LAYOUTS = (*PACKINGS, ANY)


class Table:
    """Counts of outcomes, each test's worst."""

    def __init__(self) -> None:
        self._outcomes: dict[Row, dict[str, str]] = {}

    def add(self, row: Row, test: str, outcome: str) -> None:
        """Note how one phase of a test ended; a later phase (the check that nothing is left) can only make it worse."""
        known = self._outcomes.setdefault(row, {})
        if known.get(test) != "failed":
            known[test] = outcome

    def counts(self) -> dict[Row, tuple[int, ...]]:
        """Tests passed, failed and skipped."""
        found = {row: Counter(outcomes.values()) for row, outcomes in self._outcomes.items()}
        return {row: tuple(count[outcome] for outcome in HEAD[4:]) for row, count in found.items()}


def render(counts: dict[Row, tuple[int, ...]]) -> str:
    """The table as Markdown, columns aligned."""
    lines = [HEAD, *((*row, *map(str, counts[row])) for row in sorted(counts, key=_order))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def update(file: Path, counts: dict[Row, tuple[int, ...]]) -> None:
    """Put the rows of this run into the table between the markers of a file; the rows of other runs stay."""
    text = file.read_text()
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file} has no table between {BEGIN} and {END}")
    table = render({**_parse(old), **counts})
    file.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def _parse(table: str) -> dict[Row, tuple[int, ...]]:
    rows = (tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.split("\n")[2:])
    return {row[:4]: tuple(map(int, row[4:])) for row in rows if len(row) == len(HEAD) and row[-1].isdigit()}


def _order(row: Row) -> tuple[Any, ...]:
    server, version, transport, layout = row
    release = [-int(part) for part in re.findall(r"\d+", version)]  # the newest first
    return server != "embedded", server, release, transport != "shm", _LAYOUTS.index(layout)
