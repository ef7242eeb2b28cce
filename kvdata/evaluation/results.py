"""From rows to results: means over windows, and paired intervals by window."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, TypeVar

from kvdata.edits.policies import Sees
from kvdata.evaluation.continuations import NEXT
from kvdata.evaluation.metrics import mean_interval, ratio_interval, share_interval
from kvdata.evaluation.runs import FULL, Measured, PasskeyRow, Row

M = TypeVar("M", bound=Measured)
Interval = tuple[float, float]


@dataclass(frozen=True)
class Increase:
    """NLL of one kind of continuation, in nats per token; ``ci90`` is of the increase, paired by window."""

    nll: float
    delta_nll: float
    ci90: Interval


@dataclass(frozen=True)
class Passkey:
    """Numbers found among `prompts`; ``ci90`` is of the share (Wilson)."""

    found: int
    prompts: int
    ci90: Interval
    by_depth: dict[float, float]

    @property
    def share(self) -> float:
        """Found / prompts."""
        return self.found / self.prompts


@dataclass(frozen=True)
class Result:
    """One policy at one budget.

    Attributes:
        keep: share asked for; `kept_tokens`, in whole chunks, is what the first window kept.
        windows: number of them.
        stored_bytes: of all windows.
        nll, delta_nll, ci90, kl, top1: of the true continuation; nats per token, share of tokens.
        recall: by kind, of passages of the prefix.
        attention_error: relative, mean over layers and windows.
        seconds: median over windows of ``inputs``, ``score``, ``write``, ``read``.
    """

    policy: str
    keep: float
    windows: int
    kept_tokens: int
    stored_bytes: int
    nll: float
    delta_nll: float
    ci90: Interval
    kl: float
    top1: float
    trained: bool
    sees: Sees
    revision: str = ""
    recall: dict[str, Increase] = field(default_factory=dict)
    attention_error: float | None = None
    passkey: Passkey | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "sees": self.sees.value}


@dataclass(frozen=True)
class Comparison:
    """A trained policy's NLL increase over that of the best policy of a kind that was not trained, at one budget.

    Attributes:
        ratio: of the mean increases; None where the rival's is not positive.
        ci90: paired by window. That the rival was chosen on the same windows is not part of it.
    """

    policy: str
    keep: float
    rival: str
    sees: Sees
    ratio: float | None
    ci90: tuple[float | None, float | None]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "sees": self.sees.value}


def summarise(rows: Iterable[Row], passkey: Iterable[PasskeyRow] = ()) -> list[Result]:
    """One result per policy and budget, the full cache first; all must have rows of the same windows."""
    groups, prompts = grouped(rows), grouped(passkey)
    full = {row.window: row for row in groups[FULL, 1.0]}
    return [_result(found, full, prompts.get(key, [])) for key, found in groups.items()]


def grouped(rows: Iterable[M]) -> dict[tuple[str, float], list[M]]:
    """Rows by policy and budget, in the windows' order; the full cache's first, then larger budgets first."""
    found: dict[tuple[str, float], list[M]] = {}
    for row in sorted(rows, key=lambda row: (-row.keep, row.window)):
        found.setdefault((row.policy, row.keep), []).append(row)
    return found


def increases(rows: Sequence[Row], full: Mapping[int, Row], kind: str = NEXT) -> list[float]:
    """NLL over that of the full cache, window by window."""
    return [row.nll[kind] - full[row.window].nll[kind] for row in rows]


def comparisons(rows: Iterable[Row]) -> list[Comparison]:
    """Every trained policy against the best untrained one that sees only the cache, and the best that sees queries."""
    groups = grouped(rows)
    full = {row.window: row for row in groups[FULL, 1.0]}
    deltas = {key: increases(found, full) for key, found in groups.items()}
    compared = []
    for (policy, keep), found in groups.items():
        for sees in (Sees.CACHE, Sees.QUERIES) if found[0].trained else ():
            rivals = {
                name: deltas[name, budget]
                for (name, budget), other in groups.items()
                if budget == keep and not other[0].trained and other[0].sees == sees.value
            }
            if rivals:
                rival = min(rivals, key=lambda name: fmean(rivals[name]))
                compared.append(_comparison(policy, keep, deltas[policy, keep], rival, sees, rivals[rival]))
    return compared


def _result(rows: Sequence[Row], full: Mapping[int, Row], prompts: Sequence[PasskeyRow]) -> Result:
    first = rows[0]
    kinds = {kind: _increase(rows, full, kind) for kind in first.nll}
    following = kinds.pop(NEXT)
    errors = [row.attention_error for row in rows if row.attention_error is not None]
    return Result(
        policy=first.policy,
        keep=first.keep,
        windows=len(rows),
        kept_tokens=first.kept_tokens,
        stored_bytes=sum(row.stored_bytes for row in rows),
        nll=following.nll,
        delta_nll=following.delta_nll,
        ci90=following.ci90,
        kl=fmean(row.kl[NEXT] for row in rows),
        top1=fmean(row.top1[NEXT] for row in rows),
        trained=first.trained,
        sees=Sees(first.sees),
        revision=first.revision,
        recall=kinds,
        attention_error=fmean(errors) if errors else None,
        passkey=_passkey(prompts) if prompts else None,
        seconds={name: median(row.seconds[name] for row in rows) for name in first.seconds},
    )


def _increase(rows: Sequence[Row], full: Mapping[int, Row], kind: str) -> Increase:
    deltas = increases(rows, full, kind)
    return Increase(fmean(row.nll[kind] for row in rows), fmean(deltas), mean_interval(deltas))


def _passkey(prompts: Sequence[PasskeyRow]) -> Passkey:
    depths: dict[float, list[bool]] = {}
    for row in prompts:
        depths.setdefault(row.depth, []).append(row.found)
    found = sum(row.found for row in prompts)
    by_depth = {depth: fmean(depths[depth]) for depth in sorted(depths)}
    return Passkey(found, len(prompts), share_interval(found, len(prompts)), by_depth)


def _comparison(
    policy: str, keep: float, own: Sequence[float], rival: str, sees: Sees, other: Sequence[float]
) -> Comparison:
    ratio = fmean(own) / fmean(other) if fmean(other) > 0 else None
    low, high = ratio_interval(own, other) if ratio is not None else (math.nan, math.nan)
    return Comparison(policy, keep, rival, sees, ratio, (_finite(low), _finite(high)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
