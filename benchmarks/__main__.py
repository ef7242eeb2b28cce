"""``python -m benchmarks``: kvdata against LMCache's own SDK and against the machine, in one run.

Prints one JSON line per row. A whole run (no names given) also writes ``results.json``, ``RESULTS.md`` and
``results.png`` beside this file. LMCache's environment is built first where it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import FIGURES
from benchmarks.growth import GROWTH
from benchmarks.measure import compare
from benchmarks.memory import MEMORY
from benchmarks.report import SERVERS, write
from benchmarks.rows import ROWS
from benchmarks.stack import Sizes, Stack, running

REPORTED = {**FIGURES, **MEMORY, **GROWTH}
NAMES = [*ROWS, *REPORTED]


def measure(stack: Stack, names: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of these names on one server."""
    for name in names:
        if name in ROWS:
            with ROWS[name].make(stack) as trial:
                figures = compare(trial, repeats)
        else:
            figures = REPORTED[name](stack, repeats)
        yield {"name": name, **figures, "server": stack.kind}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"rows to run, of: {', '.join(NAMES)}")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count (default: %(default)s)")
    parser.add_argument("--server", choices=SERVERS, action="append", help="default: both, the real one first")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no row named {', '.join(sorted(unknown))}")
    load, _, _ = os.getloadavg()
    rows: list[dict[str, Any]] = []
    for kind in options.server or SERVERS:
        # What no server has a part in is measured once.
        names = [name for name in options.names or NAMES if not (rows and name.startswith("prefixes_"))]
        with running(kind, Sizes()) as stack:
            for row in measure(stack, names, options.repeats):
                print(json.dumps(row), flush=True)
                rows.append(row)
    if not options.names:
        write(rows, "make bench", load, Path(__file__).parent)


if __name__ == "__main__":
    main()
