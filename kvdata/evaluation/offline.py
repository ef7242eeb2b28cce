"""Policies x budgets x windows: every cache through the server, its continuations computed here.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``D = num_kv_heads * head_dim``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvdata.datasets import KVCacheDataset
from kvdata.datasets.ingest import Progress
from kvdata.edits.rope import Rope
from kvdata.errors import InvalidRequest
from kvdata.evaluation.continuations import CUE, continuations
from kvdata.evaluation.measure import Reference
from kvdata.evaluation.methods import Method, check_document, kept_tokens, takes
from kvdata.evaluation.runs import FULL, Key, Row, Rows
from kvdata.evaluation.subject import Engine, Subject
from kvdata.evaluation.writing import Job, by_size, through_server

TOGETHER = 4  # caches in one forward: about twice as fast as one by one, on 2 cores


def evaluate(
    engine: Engine,
    dataset: KVCacheDataset,
    methods: Sequence[Method],
    keeps: Sequence[float],
    rows: Rows[Row],
    progress: Progress | None = None,
) -> None:
    """Measure every window's full cache, and every method's at every budget; what `rows` has is left out.

    Args:
        dataset: windows that the server holds, with their true continuations.
        keeps: shares of the tokens, rounded down to whole chunks.
        rows: gets each finished measurement.
        progress: wraps the iteration over groups of measurements.

    Raises:
        InvalidRequest: a window without a continuation of two tokens, a budget that is no share or not below the
            window, or two that are the same number of chunks.
        OtherSource: a method has no cache for a window's document.
        MissingKV: the server does not hold a window.
        StoreConflict, ServerError: as `kvdata.evaluation.writing.through_server`.
    """
    rope = Rope.from_config(engine.config)
    ctx = dataset.context
    todo = list(_groups(dataset, methods, keeps, ctx.chunk_size, rows))
    current: _Window | None = None
    for place, jobs in progress(todo, len(todo)) if progress else todo:
        if current is None or current.place != place:
            current = _Window(engine, dataset, place, rope)
            if full_key(place) not in rows:
                rows.add(current.reference.row(place, current.read_seconds))
        with through_server(ctx, current.subject, current.salt, jobs) as caches:
            for same, stacked in by_size(caches):
                for row in current.reference.rows(place, same, stacked):
                    rows.add(row)


def full_key(window: int) -> Key:
    """Of the row of a full cache."""
    return window, FULL, "", 1.0


def jobs_of(methods: Sequence[Method], keeps: Sequence[float], tokens: int, chunk_size: int) -> list[list[Job]]:
    """The jobs of a window of so many tokens, by budget. Errors as `evaluate`."""
    budgets = [kept_tokens(tokens, keep, chunk_size) for keep in keeps]
    if len(set(budgets)) < len(budgets) or any(kept >= tokens for kept in budgets):
        raise InvalidRequest(
            f"keeping {', '.join(f'{keep:g}' for keep in keeps)} of {tokens} tokens comes to {budgets} in chunks of "
            f"{chunk_size}: choose others, a longer context, or a server with smaller chunks"
        )
    for method in methods:
        if not any(takes(method, keep, tokens) for keep in keeps):
            raise InvalidRequest(
                f"{method.name} makes caches of {tokens} tokens to {method.share(tokens):.2f} of their bytes, and what "
                f"is asked for is {', '.join(f'{keep:g}' for keep in keeps)}; ask for its own, too"
            )
    return [
        [Job(method, keep, kept) for method in methods if takes(method, keep, tokens)]
        for keep, kept in zip(keeps, budgets, strict=True)
    ]


def subject_of(engine: Engine, dataset: KVCacheDataset, place: int) -> tuple[Subject, str]:
    """A window read from the server, and its salt; the question is the beginning of the continuation."""
    sample = dataset[place]
    following = sample["continuation"]
    return Subject(engine, sample["kv"], sample["tokens"], following, following[:CUE]), sample["salt"]


def _groups(
    dataset: KVCacheDataset, methods: Sequence[Method], keeps: Sequence[float], chunk_size: int, rows: Rows[Row]
) -> Iterator[tuple[int, list[Job]]]:
    """Windows with what is left to do; a window of which only the full cache is wanted has one empty group."""
    for place, record in enumerate(dataset.prefixes):
        if len(record.continuation) < 2:
            raise InvalidRequest(f"window {place} has no continuation of two tokens or more, so nothing can be scored")
        tokens = len(record.tokens) // chunk_size * chunk_size
        ids = record.tokens[:tokens].tolist()
        for method in methods:
            check_document(method, ids)
        if not methods and full_key(place) not in rows:
            yield place, []
        for jobs in jobs_of(methods, keeps, tokens, chunk_size):
            left = [job for job in jobs if (place, job.method.name, job.method.revision, job.keep) not in rows]
            yield from ((place, left[start : start + TOGETHER]) for start in range(0, len(left), TOGETHER))


class _Window:
    """A window read from the server, and what the model makes of it."""

    def __init__(self, engine: Engine, dataset: KVCacheDataset, place: int, rope: Rope) -> None:
        self.place = place
        started = time.perf_counter()
        self.subject, self.salt = subject_of(engine, dataset, place)
        self.read_seconds = time.perf_counter() - started
        subject = self.subject
        self.reference = Reference(engine, subject.kv, continuations(subject.tokens, subject.future), rope)
