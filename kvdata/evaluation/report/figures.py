"""Figures of the HTML report, as plotly makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvdata.edits.policies import Sees
from kvdata.evaluation.report.documents import Document
from kvdata.evaluation.report.kinds import WORDS, budgets, by_kind
from kvdata.evaluation.report.plots import styles
from kvdata.evaluation.results import Result

try:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots
except ImportError as missing:
    raise ImportError("the HTML report needs plotly and jinja2: pip install 'kvdata[eval]'") from missing

_DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "dashdot": "dashdot"}  # as matplotlib calls them
_PARTS = ("score", "write", "read")
_BUDGET_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def curves(results: Sequence[Result]) -> Any:
    """NLL increase against the share kept: a panel for each thing that policies see, the bound in every one."""
    kinds = [sees for sees in Sees if any(r.sees is sees and r.keep < 1 for r in results)]
    panels = [sees for sees in kinds if sees is not Sees.FUTURE] or kinds
    titles = [WORDS[sees] for sees in panels]
    figure = make_subplots(cols=len(panels), shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.03)
    for column, sees in enumerate(panels, start=1):
        shown = [r for r in results if r.keep < 1 and r.sees in (sees, Sees.FUTURE)]
        looks = styles(shown)
        for policy, look in looks.items():
            rows = sorted((r for r in shown if r.policy == policy), key=lambda r: r.keep)
            figure.add_trace(_curve(policy, rows, look, column == 1), row=1, col=column)
    figure.add_hline(0, line_width=1, line_color="black")
    figure.update_xaxes(title_text="tokens kept", tickformat=".0%", tickvals=budgets(results))
    figure.update_yaxes(title_text="NLL increase (nats per token)", col=1)
    return _laid_out(figure, 520)


def attention_errors(results: Sequence[Result]) -> Any:
    """Relative error of the attention outputs, a bar for every policy and budget."""
    return _bars(results, lambda r: r.attention_error, "relative error of attention outputs")


def passkey(results: Sequence[Result]) -> Any:
    """Share of numbers found, with its interval."""
    figure = _bars(results, lambda r: r.passkey.share if r.passkey else None, "numbers found")
    for trace, keep in zip(figure.data, budgets(results), strict=True):
        found = [r.passkey for r in _ordered(results, keep) if r.passkey]
        trace.error_y = {
            "array": [p.ci90[1] - p.share for p in found],
            "arrayminus": [p.share - p.ci90[0] for p in found],
            "thickness": 1,
        }
    figure.update_yaxes(tickformat=".0%", range=[0, 1.05])
    return figure


def passkey_depths(results: Sequence[Result]) -> Any:
    """Share found by depth of the number, one panel a budget."""
    keeps = budgets(results)
    figure = make_subplots(rows=1, cols=len(keeps), subplot_titles=[f"keep {keep:g}" for keep in keeps])
    for column, keep in enumerate(keeps, start=1):
        rows = [r for r in _ordered(results, keep) if r.passkey]
        depths = list(rows[0].passkey.by_depth) if rows and rows[0].passkey else []
        shares = [list(r.passkey.by_depth.values()) for r in rows if r.passkey]
        figure.add_trace(
            _heat([f"{100 * d:g} %" for d in depths], [r.policy for r in rows], shares, ".0%", "Viridis", 0, 1),
            row=1,
            col=column,
        )
    figure.update_xaxes(title_text="depth of the number")
    figure.update_yaxes(autorange="reversed")
    return _laid_out(figure, 90 + 26 * len({r.policy for r in results}))


def times(results: Sequence[Result]) -> Any:
    """Milliseconds to score, write and read one window's cache, stacked; one panel a budget."""
    keeps = budgets(results)
    figure = make_subplots(
        rows=1, cols=len(keeps), shared_yaxes=True, subplot_titles=[f"keep {keep:g}" for keep in keeps]
    )
    names = [*dict.fromkeys(r.policy for keep in keeps for r in _ordered(results, keep))]
    for column, keep in enumerate(keeps, start=1):
        rows = {r.policy: r for r in results if r.keep == keep}
        for part, colour in zip(_PARTS, _BUDGET_COLOURS, strict=False):
            values = [1000 * rows[name].seconds.get(part, 0) if name in rows else None for name in names]
            bar = go.Bar(y=names, x=values, orientation="h", name=part, marker_color=colour, showlegend=column == 1)
            figure.add_trace(bar, row=1, col=column)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="ms a window (median)")
    figure.update_yaxes(autorange="reversed")
    return _laid_out(figure, 120 + 26 * len(names))


def documents(found: Sequence[Document], results: Sequence[Result], keep: float) -> Any:
    """Mean NLL increase by document and policy at one budget; what loses most is on top."""
    policies = [r.policy for r in _ordered(results, keep)]
    values = [[document.delta_nll[policy, keep] for policy in policies] for document in found]
    names = [f"{document.name} ({document.windows})" for document in found]
    largest = max(abs(value) for row in values for value in row) or 1.0
    figure = go.Figure(_heat(policies, names, values, "+.3f", "RdBu_r", -largest, largest))
    figure.update_xaxes(tickangle=-30)
    figure.update_yaxes(autorange="reversed")
    return _laid_out(figure, 150 + 24 * len(found))


def _curve(policy: str, rows: Sequence[Result], look: tuple[str, str], legend: bool) -> Any:
    oracle, trained = rows[0].sees is Sees.FUTURE, rows[0].trained
    return go.Scatter(
        x=[r.keep for r in rows],
        y=[r.delta_nll for r in rows],
        error_y={
            "array": [r.ci90[1] - r.delta_nll for r in rows],
            "arrayminus": [r.delta_nll - r.ci90[0] for r in rows],
            "thickness": 1,
        },
        name=policy + (" (trained)" if trained else " (sees the answer)" if oracle else ""),
        legendgroup=policy,
        showlegend=legend or not oracle,
        mode="lines+markers",
        line={"color": look[0], "width": 4 if trained else 2, "dash": _DASHES[look[1]]},
    )


def _bars(results: Sequence[Result], value: Any, title: str) -> Any:
    figure = go.Figure()
    for keep, colour in zip(budgets(results), _BUDGET_COLOURS * len(results), strict=False):
        rows = [r for r in _ordered(results, keep) if value(r) is not None]
        figure.add_trace(
            go.Bar(x=[r.policy for r in rows], y=[value(r) for r in rows], name=f"keep {keep:g}", marker_color=colour)
        )
    figure.update_layout(barmode="group")
    figure.update_xaxes(tickangle=-30)
    figure.update_yaxes(title_text=title)
    return _laid_out(figure, 380)


def _heat(
    x: Sequence[str],
    y: Sequence[str],
    values: Sequence[Sequence[float]],
    form: str,
    scale: str,
    low: float,
    high: float,
) -> Any:
    return go.Heatmap(
        x=list(x),
        y=list(y),
        z=[list(row) for row in values],
        texttemplate=f"%{{z:{form}}}",
        colorscale=scale,
        zmin=low,
        zmax=high,
        showscale=False,
        xgap=1,
        ygap=1,
    )


def _ordered(results: Sequence[Result], keep: float) -> list[Result]:
    """By what they see, then by NLL increase."""
    return [r for _, rows in by_kind(results, keep) for r in rows]


def _laid_out(figure: Any, height: int) -> Any:
    return figure.update_layout(
        template="plotly_white", height=height, margin={"l": 60, "r": 20, "t": 40, "b": 40}, font={"size": 12}
    )
