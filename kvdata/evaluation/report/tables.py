"""Results on the terminal, at most 100 columns wide (80 where there is little to show)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kvdata.edits.policies import Sees
from kvdata.evaluation.decoding import Arm
from kvdata.evaluation.live_scoring import LiveResult
from kvdata.evaluation.report.kinds import budgets, by_kind
from kvdata.evaluation.results import Comparison, Result
from kvdata.evaluation.runs import FULL

_SHORT = {
    Sees.CACHE: "the cache",
    Sees.QUERIES: "queries too",
    Sees.QUESTION: "the question",
    Sees.FUTURE: "the answer",
}

Column = tuple[str, Callable[[Result], str]]


def print_results(results: Sequence[Result], comparisons: Sequence[Comparison], console: Console, title: str) -> None:
    """Quality: one table per budget, with a section for each thing that policies see; trained ones are marked ``*``."""
    columns = _quality(results)
    full = next(r for r in results if r.policy == FULL)
    console.print(f"[bold]{title}[/bold]\nfull cache: {_full(full)}", highlight=False)
    for keep in budgets(results):
        dropped = min((r for r in results if r.keep == keep), key=lambda r: r.kept_tokens)
        table = _table(f"keep {keep:g}: {dropped.kept_tokens} tokens, {_megabytes(dropped)} a window", columns)
        _fill(table, results, keep, columns)
        console.print(table)
    for found in comparisons:
        console.print(_sentence(found), highlight=False)
    console.print(
        "NLL in nats per token, 90 % intervals paired by window; * trained"
        + ("; attn.: relative error of attention outputs" if full.attention_error is not None else ""),
        style="dim",
        highlight=False,
    )


def print_costs(results: Sequence[Result], console: Console) -> None:
    """Time, and NLL increase when passages of the prefix are recalled."""
    kinds = list(results[0].recall)
    columns: list[Column] = [(kind, lambda r, kind=kind: f"{r.recall[kind].delta_nll:+.3f}") for kind in kinds]  # type: ignore[misc]
    columns += [
        (name, lambda r, name=name: f"{1000 * r.seconds.get(name, 0):.1f}")  # type: ignore[misc]
        for name in ("inputs", "score", "write", "read")
    ]
    for keep in budgets(results):
        table = _table(f"keep {keep:g}: recalling passages (NLL increase), and ms a window (median)", columns)
        _fill(table, results, keep, columns)
        console.print(table)
    console.print(
        "inputs: model passes for what a policy sees besides the cache, made once for all policies",
        style="dim",
        highlight=False,
    )


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


def print_live(results: Sequence[LiveResult], console: Console, title: str) -> None:
    """What a serving engine made of the caches, beside the figures computed here; red where it did not read all
    chunks that it was expected to."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("keep", "NLL", "increase", "90 % interval", "here", "read", "of", "tokens/s", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            r.policy,
            f"{r.keep:g}",
            f"{r.nll:.3f}",
            f"{r.delta_nll:+.3f}",
            f"{r.ci90[0]:+.3f} {r.ci90[1]:+.3f}",
            f"{r.offline_delta_nll:+.3f}",
            f"{r.read_chunks:,}",
            f"{r.expected_chunks:,}",
            f"{r.decode_tput:.1f}" if r.decode_tput else "",
            f"{r.gain:.2f}x" if r.gain else "",
            style=None if r.all_hits else "red",
        )
    console.print(table)


def _quality(results: Sequence[Result]) -> list[Column]:
    columns: list[Column] = [
        ("NLL", lambda r: f"{r.nll:.3f}"),
        ("increase", lambda r: f"{r.delta_nll:+.3f}"),
        ("90 % interval", lambda r: f"{r.ci90[0]:+.3f} {r.ci90[1]:+.3f}"),
        ("KL", lambda r: f"{r.kl:.3f}"),
        ("top-1", lambda r: f"{100 * r.top1:.1f}%"),
    ]
    if any(r.attention_error is not None for r in results):
        columns.append(("attn.", lambda r: "" if r.attention_error is None else f"{r.attention_error:.3f}"))
    if any(r.passkey for r in results):
        columns.append(("passkey", lambda r: f"{r.passkey.found}/{r.passkey.prompts}" if r.passkey else ""))
    return columns


def _table(title: str, columns: Sequence[Column]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _fill(table: Table, results: Sequence[Result], keep: float, columns: Sequence[Column]) -> None:
    """A section of rows for each thing that policies see."""
    for sees, rows in by_kind(results, keep):
        table.add_section()
        table.add_row(f"[italic]sees {_SHORT[sees]}[/italic]")
        for r in rows:
            style = "bold" if r.trained else "dim" if sees is Sees.FUTURE else None
            table.add_row(f"{'*' if r.trained else ' '}{r.policy}", *(show(r) for _, show in columns), style=style)


def _sentence(found: Comparison) -> str:
    kind = "sees only the cache" if found.sees is Sees.CACHE else "sees queries"
    words = f"keep {found.keep:g}: {found.policy} / best untrained that {kind} ({found.rival}): "
    if found.ratio is None:
        return words + "no ratio, the rival loses nothing"
    low, high = (f"{end:.2f}" if end is not None else "?" for end in found.ci90)
    return f"{words}[bold]{found.ratio:.2f}[/bold] ({low} .. {high})"


def _full(full: Result) -> str:
    recall = "".join(f", {kind} {found.nll:.3f}" for kind, found in full.recall.items())
    passkey = f", passkey {full.passkey.found}/{full.passkey.prompts}" if full.passkey else ""
    return (
        f"NLL {full.nll:.3f}{recall}{passkey}; {full.windows} windows of {full.kept_tokens} tokens, {_megabytes(full)}"
    )


def _megabytes(result: Result) -> str:
    return f"{result.stored_bytes / result.windows / 1e6:.2f} MB"
