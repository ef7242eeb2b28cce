"""One evaluation in one folder: what is measured, what is there already, and the reports made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3
from rich.console import Console

from kvdata.client.context import KVCacheContext
from kvdata.datasets.prefixes import Prefixes
from kvdata.evaluation.decoding import Arm
from kvdata.evaluation.live_scoring import live_results
from kvdata.evaluation.methods import Method, for_any_prefix, takes
from kvdata.evaluation.report import print_costs, print_live, print_results, save_csv, save_html, save_json, save_plot
from kvdata.evaluation.report.documents import document_of
from kvdata.evaluation.results import comparisons, summarise
from kvdata.evaluation.runs import FULL, Key, LiveRow, Measured, PasskeyRow, Row, Rows, open_run

M = TypeVar("M", bound=Measured)


class EvaluationFolder:
    """The rows of an evaluation, and its reports.

    Args:
        folder: made, or gone on with.
        windows: all of the prefix file: other policies, budgets and more windows of it can join later.
        ctx: of the server that holds them.
        model, dtype: that continue from the caches.

    Raises:
        OtherEvaluation: the folder holds results of other windows, another model or another chunk size.
    """

    def __init__(self, folder: Path, windows: Prefixes, ctx: KVCacheContext, model: str, dtype: str) -> None:
        self.settings = {
            "windows_blake3": _digest(windows),
            "model_name": ctx.connection.model_name,
            "model": model,
            "dtype": dtype,
            "chunk_tokens": ctx.chunk_size,
        }
        self.folder = open_run(folder, self.settings)
        self.rows = Rows(folder / "rows.jsonl", Row)
        self.passkey = Rows(folder / "passkey.jsonl", PasskeyRow)
        self.live = Rows(folder / "live.jsonl", LiveRow)
        self._started = time.monotonic()

    def report(
        self,
        windows: Prefixes,
        methods: Sequence[Method],
        keeps: Sequence[float],
        prompts: int,
        decode: Callable[[list[int]], str],
        console: Console,
        live_windows: int = 0,
        decoded: dict[tuple[str, float], tuple[Arm, float]] | None = None,
    ) -> None:
        """Tables on `console`, and ``report.json``, ``.csv``, ``.png`` and ``.html`` of what was asked for this time.

        Args:
            windows: the first ones of the prefix file, which were measured.
            prompts: passkey prompts.
            decode: token ids to text.
            live_windows: of the windows, scored by an engine.
            decoded: from `decode_live`.
        """
        rows = chosen(self.rows, len(windows), methods, keeps)
        found = summarise(rows, chosen(self.passkey, prompts, for_any_prefix(methods), keeps))
        compared = comparisons(rows)
        live = live_results(chosen(self.live, live_windows, methods, keeps), decoded or {}) if live_windows else []
        title = f"KV cache compression of {self.settings['model']}"
        about = self._about(windows, rows)
        report = {"about": about, "settings": self.settings, "results": found, "comparisons": compared, "live": live}
        save_json(report, self.folder / "report.json")
        save_csv(found, self.folder / "report.csv")
        save_plot(found, self.folder / "report.png", title)
        save_html(self.folder / "report.html", title, about, found, compared, rows, windows, decode, live)
        print_results(found, compared, console, title)
        print_costs(found, console)
        if live:
            print_live(live, console, "through the serving engine")

    def _about(self, windows: Prefixes, rows: Sequence[Row]) -> dict[str, Any]:
        lengths = sorted({row.kept_tokens for row in rows if row.policy == FULL})
        continuations = sorted({len(record.continuation) for record in windows})
        return {
            "model": f"{self.settings['model']}, computing in {self.settings['dtype']}",
            "windows": f"{len(windows)} from {len({document_of(r.meta) for r in windows})} documents",
            "tokens": f"{_span(lengths)} cached, {_span(continuations)} following",
            "chunk size": f"{self.settings['chunk_tokens']} tokens",
            "took": f"{time.monotonic() - self._started:.0f} s this time",
        }


def chosen(rows: Rows[M], windows: int, methods: Sequence[Method], keeps: Sequence[float]) -> list[M]:
    """The rows of these methods, in their revisions, at these budgets, and of the full cache."""
    full = [rows[window, FULL, "", 1.0] for window in range(windows)]
    keys: list[Key] = [
        (row.window, method.name, method.revision, keep)
        for method in methods
        for keep in keeps
        for row in full
        if takes(method, keep, row.kept_tokens)
    ]
    return full + [rows[key] for key in keys]


def _digest(windows: Prefixes) -> str:
    """Tells windows with these tokens, salts and continuations from others."""
    digest = blake3(windows.digest().encode())
    for record in windows:
        digest.update(f"{len(record.continuation)}:".encode() + record.continuation.tobytes())
    return digest.hexdigest(8)


def _span(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"
