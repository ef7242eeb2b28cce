"""Showing results: a table on the terminal, JSON for programs, a plot for people."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvdata.edits.policies import Sees
from kvdata.evaluation.decoding import Arm
from kvdata.evaluation.dropping import Result

# Okabe-Ito, readable with colour-vision deficiency; black and grey are kept for the reference and the oracle.
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#F0E442")
_TRAINED = "#D55E00"


def print_table(results: Sequence[Result], console: Console, title: str) -> None:
    """One section per budget, one row per policy, 80 columns wide.

    ``vs best`` is a trained policy's NLL increase over that of the best training-free policy of its budget.
    """
    caption = "NLL in nats per token; 90 % interval paired by window; oracle: sees the answer, a bound"
    table = Table(title=title, caption=caption, box=box.SIMPLE, padding=(0, 1))
    table.add_column("policy", no_wrap=True)
    for name in ("NLL", "increase", "90 % interval", "KL", "top-1", "vs best"):
        table.add_column(name, justify="right", no_wrap=True)
    for keep in sorted({r.keep for r in results}, reverse=True):
        rows = sorted((r for r in results if r.keep == keep), key=lambda r: (r.sees is Sees.FUTURE, r.delta_nll))
        first = rows[0]
        table.add_section()
        table.add_row(
            f"[italic]keep {keep:g}[/italic]",
            "",
            "",
            f"{first.kept_tokens} tokens,",
            f"{first.stored_bytes / 1e6:.0f} MB",
        )
        for r in rows:
            rival = _rival(results, keep)
            share = f"{r.delta_nll / rival.delta_nll:.2f}" if r.trained and rival and rival.delta_nll > 0 else ""
            table.add_row(
                r.policy,
                f"{r.nll:.3f}",
                f"{r.delta_nll:+.3f}",
                f"{r.ci90[0]:+.3f} {r.ci90[1]:+.3f}",
                f"{r.kl:.3f}",
                f"{100 * r.top1:.1f} %",
                share,
                style="bold" if r.trained else "dim" if r.sees is Sees.FUTURE else None,
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
    with _figure(path, title) as axes:
        colours = iter(_COLOURS)
        policies = list(dict.fromkeys(r.policy for r in results))
        for number, policy in enumerate(policies):
            rows = sorted((r for r in results if r.policy == policy), key=lambda r: r.keep)
            if rows[0].keep == 1.0:
                axes.axhline(0, color="black", linewidth=1, label=f"{policy} cache (NLL {rows[0].nll:.2f})")
                continue
            oracle = rows[0].sees is Sees.FUTURE
            colour = "grey" if oracle else _TRAINED if rows[0].trained else next(colours)
            low = [max(0.0, r.delta_nll - r.ci90[0]) for r in rows]
            high = [max(0.0, r.ci90[1] - r.delta_nll) for r in rows]
            # Side by side, or the intervals of one budget would hide each other.
            aside = 0.008 * (number - len(policies) / 2)
            axes.errorbar(
                [r.keep + aside for r in rows],
                [r.delta_nll for r in rows],
                yerr=[low, high],
                color=colour,
                marker="o",
                linewidth=3 if rows[0].trained else 1.5,
                linestyle="--" if oracle else "-",
                capsize=3,
                label=policy + (" (trained)" if rows[0].trained else " (sees the answer)" if oracle else ""),
            )
        axes.set_xlabel("tokens kept")
        axes.set_ylabel("NLL increase over the full cache (nats per token)")
        axes.set_xticks(sorted({r.keep for r in results if r.keep < 1}))


def print_decoding(arms: Sequence[Arm], logprob: Mapping[str, float], console: Console, title: str) -> None:
    """One row per arm: decode throughput, gain over the first arm, log-probability, and whether all were hits."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1))
    table.add_column("caches", no_wrap=True)
    for name in ("tokens/s", "gain", "log-prob", "chunks read", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in arms:
        table.add_row(
            arm.name,
            f"{arm.decode_tput:.1f}",
            f"{arm.decode_tput / arms[0].decode_tput:.2f}x",
            f"{logprob[arm.name]:.3f}" if arm.name in logprob else "",
            f"{sum(arm.read_chunks):,}",
            f"{arm.expected_chunks * len(arm.read_chunks):,}",
            style=None if arm.all_hits else "red",
        )
    console.print(table)


def save_gain_plot(gains: Mapping[str, Mapping[float, float]], path: Path, title: str) -> None:
    """Gain in decode throughput over the full cache against the share of kept tokens, one line per policy."""
    with _figure(path, title) as axes:
        for policy, points in gains.items():
            keeps = sorted(points)
            axes.plot(keeps, [points[keep] for keep in keeps], marker="o", label=policy)
        axes.axhline(1, color="black", linewidth=1, label="full cache")
        axes.set_xlabel("tokens kept")
        axes.set_ylabel("decode throughput / that of the full cache")
        axes.set_xticks(sorted({keep for points in gains.values() for keep in points}))
        axes.set_ylim(bottom=0)


@contextmanager
def _figure(path: Path, title: str) -> Iterator[Any]:
    """Axes over the share of kept tokens; saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    try:
        yield axes
        axes.set_title(textwrap.fill(title, 70))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.margins(x=0.15)
        axes.grid(alpha=0.3)
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    finally:
        plt.close(figure)


def _rival(results: Sequence[Result], keep: float) -> Result | None:
    """The best policy of a budget that sees only the cache and has learnt nothing."""
    rows = [r for r in results if r.keep == keep < 1 and r.sees is Sees.CACHE and not r.trained]
    return min(rows, key=lambda r: r.delta_nll, default=None)
