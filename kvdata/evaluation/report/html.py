"""One HTML file with everything: it opens without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdata.datasets.prefixes import Prefixes
from kvdata.evaluation.live_scoring import LiveResult
from kvdata.evaluation.report.documents import by_document, worst_windows
from kvdata.evaluation.report.kinds import WORDS, budgets, by_kind
from kvdata.evaluation.results import Comparison, Result
from kvdata.evaluation.runs import FULL, Row

_CONFIG = {"displayModeBar": False, "responsive": True}


def save_html(
    path: Path,
    title: str,
    about: Mapping[str, Any],
    results: Sequence[Result],
    comparisons: Sequence[Comparison],
    rows: Sequence[Row],
    windows: Prefixes,
    decode: Callable[[list[int]], str],
    live: Sequence[LiveResult] = (),
) -> None:
    """Write the report.

    Args:
        about: what was measured, as names and values for the reader.
        rows: those behind `results`, for the worst cases.
        windows: the prefix file's, in the rows' order.
        decode: token ids to text; what it says is escaped.
    """
    try:
        from jinja2 import Environment, PackageLoader
        from plotly.offline import get_plotlyjs
    except ImportError as missing:
        raise ImportError("the HTML report needs plotly and jinja2: pip install 'kvdata[eval]'") from missing
    environment = Environment(loader=PackageLoader("kvdata.evaluation.report"), autoescape=True, trim_blocks=True)
    page = environment.get_template("report.html.jinja").render(
        title=title,
        about=about,
        full=next(r for r in results if r.policy == FULL),
        tables=[(keep, [(WORDS[sees], found) for sees, found in by_kind(results, keep)]) for keep in budgets(results)],
        comparisons=comparisons,
        words={sees.value: words for sees, words in WORDS.items()},
        figures=_figures(results, rows, windows),
        worst=worst_windows(rows, windows, decode),
        live=live,
        plotly=get_plotlyjs(),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _figures(results: Sequence[Result], rows: Sequence[Row], windows: Prefixes) -> dict[str, str]:
    """Names and HTML of the figures that these results have."""
    from kvdata.evaluation.report import figures

    made = {"curves": figures.curves(results), "times": figures.times(results)}
    if any(r.attention_error for r in results):
        made["attention"] = figures.attention_errors(results)
    if any(r.passkey for r in results):
        made |= {"passkey": figures.passkey(results), "depths": figures.passkey_depths(results)}
    found = by_document(rows, windows)
    made |= {f"documents {keep:g}": figures.documents(found, results, keep) for keep in budgets(results)}
    return {
        name: figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG) for name, figure in made.items()
    }
