"""Plots as PNG files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvdata.edits.policies import Sees
from kvdata.evaluation.report.kinds import WORDS
from kvdata.evaluation.results import Result

# Okabe-Ito, readable with colour-vision deficiency; black and grey are kept for the reference and the oracle.
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#F0E442")
TRAINED = ("#D55E00", "#8A2B06", "#FF9C5B")
_DASHES = ("solid", "dashed", "dotted", "dashdot")


def save_plot(results: Sequence[Result], path: Path, title: str) -> None:
    """NLL increase over the full cache against the share of kept tokens: a panel for each thing that policies see.

    What sees the answer is drawn into every panel, as the bound.
    """
    kinds = [sees for sees in Sees if any(r.sees is sees and r.keep < 1 for r in results)]
    panels = [sees for sees in kinds if sees is not Sees.FUTURE] or kinds
    with _figure(path, title, len(panels)) as axes:
        for sees, panel in zip(panels, axes, strict=True):
            shown = [r for r in results if r.keep < 1 and r.sees in (sees, Sees.FUTURE)]
            _curves(panel, shown, next(r for r in results if r.keep == 1))
            if len(panels) > 1:
                panel.set_title(WORDS[sees], fontsize=10)
        axes[0].set_ylabel("NLL increase over the full cache (nats per token)")
        axes[0].set_xticks(sorted({r.keep for r in results if r.keep < 1}))


def save_gain_plot(gains: Mapping[str, Mapping[float, float]], path: Path, title: str) -> None:
    """Gain in decode throughput over the full cache against the share of kept tokens, one line per policy."""
    with _figure(path, title) as (axes,):
        for policy, points in gains.items():
            keeps = sorted(points)
            axes.plot(keeps, [points[keep] for keep in keeps], marker="o", label=policy)
        axes.axhline(1, color="black", linewidth=1, label="full cache")
        axes.set_ylabel("decode throughput / that of the full cache")
        axes.set_xticks(sorted({keep for points in gains.values() for keep in points}))
        axes.set_ylim(bottom=0)


def _curves(axes: Any, results: Sequence[Result], full: Result) -> None:
    axes.axhline(0, color="black", linewidth=1, label=f"full cache (NLL {full.nll:.2f})")
    policies = list(dict.fromkeys(r.policy for r in results))
    looks = styles(results)
    for place, policy in enumerate(policies):
        rows = sorted((r for r in results if r.policy == policy), key=lambda r: r.keep)
        oracle, trained = rows[0].sees is Sees.FUTURE, rows[0].trained
        low = [max(0.0, r.delta_nll - r.ci90[0]) for r in rows]
        high = [max(0.0, r.ci90[1] - r.delta_nll) for r in rows]
        # Side by side, or the intervals of one budget would hide each other.
        aside = 0.008 * (place - len(policies) / 2)
        axes.errorbar(
            [r.keep + aside for r in rows],
            [r.delta_nll for r in rows],
            yerr=[low, high],
            color=looks[policy][0],
            marker="o",
            linewidth=3 if trained else 1.5,
            linestyle=looks[policy][1],
            capsize=3,
            label=policy + (" (trained)" if trained else " (sees the answer)" if oracle else ""),
        )


def styles(results: Sequence[Result]) -> dict[str, tuple[str, str]]:
    """Colour and line style of each policy; no two of one panel look alike."""
    found: dict[str, tuple[str, str]] = {}
    plain = trained = 0
    for policy, first in {r.policy: r for r in results}.items():
        if first.sees is Sees.FUTURE:
            found[policy] = "grey", "dashed"
        elif first.trained:
            found[policy] = TRAINED[trained % len(TRAINED)], "solid"
            trained += 1
        else:
            found[policy] = COLOURS[plain % len(COLOURS)], _DASHES[plain // len(COLOURS) % len(_DASHES)]
            plain += 1
    return found


@contextmanager
def _figure(path: Path, title: str, panels: int = 1) -> Iterator[Any]:
    """Axes over the share of kept tokens, side by side; saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    width = 8.0 if panels == 1 else 5.0 * panels
    figure, axes = plt.subplots(
        1, panels, figsize=(width, 5), layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    try:
        yield list(axes[0])
        figure.suptitle(textwrap.fill(title, int(9 * width)))
        for panel in axes[0]:
            panel.set_xlabel("tokens kept")
            panel.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            panel.margins(x=0.15)
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8 if panels > 1 else None)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    finally:
        plt.close(figure)
