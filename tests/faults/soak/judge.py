"""What must hold of a soak; each violation is a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.faults.checks import SLACK
from tests.faults.soak.records import KILLED, LOST, Held, Operation, Struck

GOOD = ("ok", "partial", "dedup", "miss")  # outcomes that are no error
_SHOWN = 3  # of each kind of violation


@dataclass(frozen=True)
class Rules:
    """What is allowed.

    Attributes:
        timeout: seconds that a client gives each call.
        killed: how many of their threads went with clients that were killed.
        always: errors that the load itself may bring.
        brings: errors that each fault may bring.
        growth: how much more of something may be held in the end; nothing where it is not named.
    """

    timeout: float
    killed: int
    always: frozenset[str]
    brings: Mapping[str, frozenset[str]]
    growth: Mapping[str, float] = field(default_factory=dict)

    @property
    def longest(self) -> float:
        """Seconds beyond which a call has hung: what is given back after its end may take the slack."""
        return self.timeout + SLACK

    def near(self, operation: Operation, faults: Iterable[Struck]) -> Iterator[Struck]:
        """Faults that an operation may have felt: those that were on in it, or so shortly before that a call that
        met them may still have held its connection."""
        end = operation.start if operation.end is None else operation.end
        return (f for f in faults if f.start <= end and operation.start <= f.end + self.longest)


def judge(
    operations: Sequence[Operation], faults: Sequence[Struck], held: Sequence[Held], rules: Rules, began: float
) -> list[str]:
    """All violations; ``began`` is when the soak did, to say when they happened."""

    def when(operation: Operation) -> str:
        return f"{operation.kind} of {operation.client} at {operation.start - began:.1f} s"

    outcomes = Counter(operation.outcome for operation in operations)
    violations = [
        [f"wrong tensor: {when(o)}" for o in operations if o.outcome == "wrong"],
        [f"ended in nothing: {when(o)}" for o in operations if o.outcome == LOST],
        [f"hung: {when(o)} took {o.seconds:.1f} s" for o in operations if o.seconds > rules.longest],
        [f"error that does not say what it must: {when(o)}: {o.complaint}" for o in operations if o.complaint],
        [f"unexpected error: {when(o)}: {o.outcome}: {o.said}" for o in _unexpected(operations, faults, rules)],
        [line for one in held for line in _grown(one, rules)],
    ]
    if outcomes[KILLED] > rules.killed:
        violations.append([f"{outcomes[KILLED]} operations were cut off, and {rules.killed} threads killed"])
    if not any(outcomes[good] for good in ("ok", "partial")):
        violations.append(["nothing was ever read or stored: that proves nothing"])
    return [line for lines in violations for line in _shortened(lines)]


def _unexpected(operations: Sequence[Operation], faults: Sequence[Struck], rules: Rules) -> Iterator[Operation]:
    for operation in operations:
        if operation.outcome in (*GOOD, "wrong", KILLED, LOST) or operation.outcome in rules.always:
            continue
        if not any(operation.outcome in rules.brings[fault.name] for fault in rules.near(operation, faults)):
            yield operation


def _grown(held: Held, rules: Rules) -> Iterator[str]:
    for name, start in held.start.items():
        if held.end[name] > start + rules.growth.get(name, 0):
            yield f"grown: {held.who} holds {held.end[name]:g} {name}, and {start:g} at the start"


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], f"... and {more} more like that"] if more > 0 else lines
