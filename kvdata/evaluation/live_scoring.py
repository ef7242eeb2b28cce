"""The same caches through a serving engine: fixed continuations scored by it, and how fast it decodes.

A continuation's token is scored by one request for one token: the compressed cache's address, then the continuation up
to the token before. Asking for the log-probabilities of a prompt would make an engine compute all of it instead of
reading the cache. An engine puts what follows right behind the address's ids, as `continue_from` does offline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvdata.client.context import KVCacheContext
from kvdata.client.counters import counters
from kvdata.datasets import KVCacheDataset
from kvdata.datasets.ingest import Progress
from kvdata.edits.address import compressed_address
from kvdata.edits.policies import Sees
from kvdata.errors import ProtocolError
from kvdata.evaluation.decoding import Arm, chunks_read_since, decode_arms
from kvdata.evaluation.methods import Method, kept_tokens, takes
from kvdata.evaluation.metrics import mean_interval, next_token_nll
from kvdata.evaluation.offline import full_key, jobs_of, subject_of
from kvdata.evaluation.results import Interval, grouped
from kvdata.evaluation.runs import FULL, LiveRow, Rows
from kvdata.evaluation.subject import Engine, Subject
from kvdata.evaluation.writing import about_full, through_server
from kvdata.sdk.stream import PostCompletion

DECODED = 64


@dataclass(frozen=True)
class LiveResult:
    """One policy at one budget, as a serving engine saw it; NLL in nats per token, intervals paired by window.

    Attributes:
        nll, delta_nll, ci90: by the engine; the increase is over its own figure for the full cache.
        offline_delta_nll: of the same tokens and caches, by the model here.
        gap_ci90: of `delta_nll` minus `offline_delta_nll`.
        read_chunks, expected_chunks: what the server counted while scoring, and what it counts if all of it was read.
        decode_tput, gain: tokens/s while decoding, and over the full cache's; None when not measured.
    """

    policy: str
    keep: float
    windows: int
    tokens: int
    nll: float
    delta_nll: float
    ci90: Interval
    offline_delta_nll: float
    gap_ci90: Interval
    read_chunks: int
    expected_chunks: int
    trained: bool
    sees: Sees
    decode_tput: float | None = None
    gain: float | None = None
    decode_all_hits: bool | None = None

    @property
    def all_hits(self) -> bool:
        """The engine read every chunk it was expected to, by the server's counter."""
        return self.read_chunks == self.expected_chunks and self.decode_all_hits is not False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "sees": self.sees.value}


@dataclass(frozen=True)
class LiveScorer:
    """Asks a serving engine for the log-probabilities of given tokens.

    Args:
        ctx: of the LMCache server that the engine uses; its counters are read, so nobody else may use it.
        complete: asks the engine; its prefix cache must be off.
        engine: the same model here, for the offline figure.
        tokens: of a continuation that are scored; fewer where it is shorter, or where they would fill another chunk,
            which an engine would store.
    """

    ctx: KVCacheContext
    complete: PostCompletion
    engine: Engine
    tokens: int

    def row(self, about: dict[str, Any], address: tuple[list[int], str], kv: Tensor, following: Tensor) -> LiveRow:
        """Score what follows one cache ``[2, L, T, D]``, by the engine from `address`, and here from `kv`."""
        ids, salt = address
        count = min(self.tokens, len(following) - 1, self.ctx.chunk_size - 1)
        fed = following[: count + 1]
        expected = count * (len(ids) // self.ctx.chunk_size)
        self.ctx.settle()  # what was read here before counts before
        before = counters(self.ctx.connection.http_url)["retrieved_chunks"]
        nll = -fmean(self._logprobs(ids, salt, fed.tolist()))
        read = chunks_read_since(self.ctx, before, expected)
        offline = float(next_token_nll(self.engine.continue_from(kv[None], fed[None]), fed[None]))
        return LiveRow(**about, tokens=count, nll=nll, offline_nll=offline, read_chunks=read, expected_chunks=expected)

    def _logprobs(self, ids: list[int], salt: str, fed: list[int]) -> Iterator[float]:
        """Of each of `fed` after those before it; the first is given."""
        for place in range(1, len(fed)):
            params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1, "allowed_token_ids": [fed[place]]}
            events = list(self.complete(ids + fed[:place], params, salt))
            if len(events) != 1 or events[0].token_id != fed[place] or events[0].logprob is None:
                raise ProtocolError(
                    f"the engine answered a request for the log-probability of token {fed[place]} with {events}; it "
                    "must support allowed_token_ids and logprobs, as vLLM does"
                )
            yield events[0].logprob


def score_live(
    scorer: LiveScorer,
    dataset: KVCacheDataset,
    methods: Sequence[Method],
    keeps: Sequence[float],
    rows: Rows[LiveRow],
    progress: Progress | None = None,
) -> None:
    """Have a serving engine score each window's continuation from every cache; what `rows` has is left out.

    Raises:
        ProtocolError: the engine reports no log-probabilities.
        KVCacheSDKError: as `kvdata.evaluation.offline.evaluate`, and whatever the engine's client raises.
    """
    ctx = scorer.ctx
    for place in progress(range(len(dataset)), len(dataset)) if progress else range(len(dataset)):
        subject, salt = subject_of(scorer.engine, dataset, place)
        if full_key(place) not in rows:
            about = about_full(place, len(subject.ids))
            rows.add(scorer.row(about, (subject.ids, salt), subject.kv, subject.future))
        for job in (job for same in jobs_of(methods, keeps, len(subject.ids), ctx.chunk_size) for job in same):
            if (place, job.method.name, job.method.revision, job.keep) not in rows:
                with through_server(ctx, subject, salt, [job]) as (cache,):
                    about = job.about(place, cache.kv)
                    rows.add(scorer.row(about, (cache.tokens, cache.salt), cache.kv, subject.future))


def decode_live(
    scorer: LiveScorer,
    dataset: KVCacheDataset,
    methods: Sequence[Method],
    keeps: Sequence[float],
    rounds: int = 1,
    progress: Progress | None = None,
) -> dict[tuple[str, float], tuple[Arm, float]]:
    """Decode `DECODED` tokens after every window from each method's caches: arm and gain by policy and budget.

    Each budget is compared with the full cache decoded in the same turns. Errors as `decode_arms`.
    """
    found: dict[tuple[str, float], tuple[Arm, float]] = {}
    subjects = {tuple(s.ids): s for s, _ in (subject_of(scorer.engine, dataset, i) for i in range(len(dataset)))}
    prompts = [[*s.ids, int(s.future[0])] for s in subjects.values()]
    params = {"temperature": 0.0, "max_tokens": DECODED, "ignore_eos": True}
    for keep in keeps:
        taking = [m for m in methods if all(takes(m, keep, len(ids)) for ids in subjects)]
        edits = {method.name: _Edit(method, keep, subjects) for method in taking}
        arms = decode_arms(
            scorer.ctx, scorer.complete, prompts, {FULL: None, **edits}, params, rounds, progress=progress
        )
        for arm in arms:
            found[arm.name, 1.0 if arm.name == FULL else keep] = arm, arm.decode_tput / arms[0].decode_tput
        for ids, salt in (request for arm in arms[1:] for request in arm.requests):
            scorer.ctx.delete(ids, salt)
    return found


def live_results(rows: Sequence[LiveRow], decoded: Mapping[tuple[str, float], tuple[Arm, float]]) -> list[LiveResult]:
    """One result per policy and budget, the full cache first."""
    groups = grouped(rows)
    full = {row.window: row for row in groups[FULL, 1.0]}
    return [_result(found, full, decoded.get(key)) for key, found in groups.items()]


def _result(rows: Sequence[LiveRow], full: Mapping[int, LiveRow], decoded: tuple[Arm, float] | None) -> LiveResult:
    deltas = [row.nll - full[row.window].nll for row in rows]
    offline = [row.offline_nll - full[row.window].offline_nll for row in rows]
    arm, gain = decoded or (None, None)
    return LiveResult(
        policy=rows[0].policy,
        keep=rows[0].keep,
        windows=len(rows),
        tokens=sum(row.tokens for row in rows),
        nll=fmean(row.nll for row in rows),
        delta_nll=fmean(deltas),
        ci90=mean_interval(deltas),
        offline_delta_nll=fmean(offline),
        gap_ci90=mean_interval([a - b for a, b in zip(deltas, offline, strict=True)]),
        read_chunks=sum(row.read_chunks for row in rows),
        expected_chunks=sum(row.expected_chunks for row in rows),
        trained=rows[0].trained,
        sees=Sees(rows[0].sees),
        decode_tput=arm.decode_tput if arm else None,
        gain=gain,
        decode_all_hits=arm.all_hits if arm else None,
    )


@dataclass(frozen=True)
class _Edit:
    """A method as an edit of streams, under the address that the evaluation uses."""

    method: Method
    keep: float
    subjects: Mapping[tuple[int, ...], Subject] = field(repr=False)

    def derive(
        self, kv: Tensor, tokens: Sequence[int], chunk_size: int, cache_salt: str
    ) -> tuple[Tensor, list[int], str]:
        ids = [int(token) for token in tokens]
        source = self.subjects[tuple(ids)].source(self.method.sees)
        with torch.inference_mode():
            smaller = self.method.compress(kv, kept_tokens(len(ids), self.keep, chunk_size), source).to(kv.dtype)
        address = compressed_address(ids, smaller.shape[2], self.method.name, self.method.revision, cache_salt)
        return smaller, *address
