"""What is printed at the end of a soak, and written as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.faults.soak.figures import MEMORY
from tests.faults.soak.judge import Rules
from tests.faults.soak.load import KINDS
from tests.faults.soak.records import KILLED, Held, Operation, Struck

_FIRST = ("ok", "partial", "dedup", "miss", "wrong")
_LAST = ("lost", KILLED)


def summary(
    operations: Sequence[Operation], faults: Sequence[Struck], held: Sequence[Held], rules: Rules
) -> dict[str, Any]:
    """Everything that is printed, as plain numbers."""
    calm = [operation for operation in operations if not any(rules.near(operation, faults))]
    struck: dict[str, dict[str, int]] = {name: {"times": 0, "struck": 0} for name in rules.brings}
    for fault in faults:
        struck[fault.name]["times"] += 1
        struck[fault.name]["struck"] += fault.times
    return {
        "operations": {kind: _counts([o for o in operations if o.kind == kind]) for kind in KINDS},
        "all": _counts(operations),
        "calm": _counts(calm),
        "faults": struck,
        "held": {one.who: {name: [one.start[name], one.end[name]] for name in one.start} for one in held},
    }


def _counts(operations: Sequence[Operation]) -> dict[str, Any]:
    milliseconds = [1000 * operation.seconds for operation in operations if operation.end is not None] or [0.0]
    p50, p99 = np.percentile(milliseconds, [50, 99]).tolist()
    return {
        "count": len(operations),
        "outcomes": dict(Counter(operation.outcome for operation in operations)),
        "p50": p50,
        "p99": p99,
        "longest": max(milliseconds),
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Three tables."""
    console.print(_operations(found), _faults(found), _held(found))


def _operations(found: dict[str, Any]) -> Table:
    columns = [*found["operations"].values(), found["all"], found["calm"]]
    table = Table("", *KINDS, "all", "calm", title="Operations")
    for column in table.columns[1:]:
        column.justify = "right"
    errors = sorted({*found["all"]["outcomes"]} - {*_FIRST, *_LAST})
    for outcome in (*_FIRST, *errors, *_LAST):
        table.add_row(outcome, *(str(column["outcomes"].get(outcome, 0)) for column in columns))
    table.add_section()
    table.add_row("count", *(str(column["count"]) for column in columns))
    for name in ("p50", "p99", "longest"):
        table.add_row(f"{name} ms", *(f"{column[name]:.1f}" for column in columns))
    return table


def _faults(found: dict[str, Any]) -> Table:
    table = Table("fault", "times", "messages, chunks or processes struck", title="Faults")
    for name, counts in found["faults"].items():
        table.add_row(name, str(counts["times"]), str(counts["struck"]))
    return table


def _held(found: dict[str, Any]) -> Table:
    table = Table("held by", "what", "start", "end", title="Held while nobody calls")
    for who, figures in found["held"].items():
        for name, (start, end) in figures.items():
            digits = ".1f" if name == MEMORY else "g"
            table.add_row(who, name, f"{start:{digits}}", f"{end:{digits}}")
        table.add_section()
    return table
