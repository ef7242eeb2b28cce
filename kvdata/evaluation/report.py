"""Showing results: a table on the terminal, JSON for programs, a plot for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvdata.evaluation.dropping import Result

# Okabe-Ito, readable with colour-vision deficiency; black and grey are kept for the reference and the oracle.
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#F0E442")
_TRAINED = "#D55E00"


def print_table(results: Sequence[Result], console: Console, title: str) -> None:
    """One row per policy and budget; the best training-free policy of each budget is bold."""
    best = {keep: min(rows, key=lambda r: r.delta_nll).policy for keep, rows in _training_free(results).items()}
    table = Table(title=title, caption="NLL in nats per token; interval: 90 %, paired by window")
    for name in ("policy", "keep", "NLL", "increase", "90 % interval", "KL", "top-1", "tokens", "stored MB", "of best"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for r in sorted(results, key=lambda r: (-r.keep, r.oracle, r.delta_nll)):
        rival = _rival(results, r.keep)
        compared = r.trained and rival is not None and rival.delta_nll > 0
        table.add_row(
            r.policy + (" (trained)" if r.trained else " (sees the answer)" if r.oracle else ""),
            f"{r.keep:g}",
            f"{r.nll:.3f}",
            f"{r.delta_nll:+.3f}",
            f"{r.ci90[0]:+.3f} .. {r.ci90[1]:+.3f}",
            f"{r.kl:.3f}",
            f"{100 * r.top1:.1f} %",
            str(r.kept_tokens),
            f"{r.stored_bytes / 1e6:.0f}",
            f"{r.delta_nll / rival.delta_nll:.2f}" if compared and rival else "",
            style="bold" if best.get(r.keep) == r.policy or r.trained else None,
        )
    console.print(table)


def save_json(report: Mapping[str, Any], path: Path) -> None:
    """Write a report; `Result` rows become plain objects."""
    plain = {
        key: [r.to_dict() if isinstance(r, Result) else r for r in value] if isinstance(value, list) else value
        for key, value in report.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain, indent=2) + "\n")


def save_plot(results: Sequence[Result], path: Path, title: str) -> None:
    """NLL increase over the full cache against the share of kept tokens, one line per policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    colours = iter(_COLOURS)
    for policy in dict.fromkeys(r.policy for r in results):
        rows = sorted((r for r in results if r.policy == policy), key=lambda r: r.keep)
        if rows[0].keep == 1.0:
            axes.axhline(0, color="black", linewidth=1, label=f"{policy} cache (NLL {rows[0].nll:.2f})")
            continue
        colour = "grey" if rows[0].oracle else _TRAINED if rows[0].trained else next(colours)
        low = [max(0.0, r.delta_nll - r.ci90[0]) for r in rows]
        high = [max(0.0, r.ci90[1] - r.delta_nll) for r in rows]
        axes.errorbar(
            [r.keep for r in rows],
            [r.delta_nll for r in rows],
            yerr=[low, high],
            color=colour,
            marker="o",
            linewidth=3 if rows[0].trained else 1.5,
            linestyle="--" if rows[0].oracle else "-",
            capsize=3,
            label=policy + (" (trained)" if rows[0].trained else " (sees the answer)" if rows[0].oracle else ""),
        )
    axes.set_xlabel("tokens kept")
    axes.set_ylabel("NLL increase over the full cache (nats per token)")
    axes.set_title(title)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xticks(sorted({r.keep for r in results if r.keep < 1}))
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _training_free(results: Sequence[Result]) -> dict[float, list[Result]]:
    found: dict[float, list[Result]] = {}
    for r in results:
        if not (r.trained or r.oracle or r.keep == 1.0):
            found.setdefault(r.keep, []).append(r)
    return found


def _rival(results: Sequence[Result], keep: float) -> Result | None:
    rows = _training_free(results).get(keep)
    return min(rows, key=lambda r: r.delta_nll) if rows else None
