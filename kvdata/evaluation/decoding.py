"""Decoding from full and from edited caches on a live engine: throughput, proven cache hits, and what it costs.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``D = num_kv_heads * head_dim``, ``N`` continuation tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvdata.client.context import KVCacheContext
from kvdata.client.counters import counters
from kvdata.datasets.ingest import Progress
from kvdata.errors import InvalidRequest, MissingKV
from kvdata.sdk.batch import LMCacheBatchedStream
from kvdata.sdk.metrics import Metrics
from kvdata.sdk.stream import DerivedEdit, EditFunction, LMCacheStream, PostCompletion, create_request

Address = tuple[list[int], str]  # prompt token ids and salt of a request

_POLL_SECONDS = 0.05
_COUNTED_SECONDS = 5.0


class Scorer(Protocol):
    """Next-token logits after a cache; `kvdata.engines.huggingface.HuggingFaceEngine` has them."""

    def continue_from(self, kv: Tensor, continuation: Tensor, start_position: int | None = None) -> Tensor:
        """``[B, 2, L, T, D]`` and ``[B, N]`` -> ``[B, N, V]``."""


@dataclass
class Arm:
    """One way of decoding the same prompts, measured by `decode_arms`.

    Attributes:
        name: ``"full"``, or the edit's.
        prefill: of the prompts; all hits for every arm after the first.
        modify: the edit; None for the full cache.
        decodes: one per round.
        requests: token ids and salt that each prompt is decoded from.
        continuations: ids generated in the first round, one list per prompt.
        texts: the same as text.
        read_chunks: chunks that the server counted as read in each round.
        expected_chunks: what it counts when every request is answered from the cache as far as whole chunks go.
    """

    name: str
    prefill: Metrics
    modify: Metrics | None
    requests: list[Address] = field(repr=False)
    expected_chunks: int
    decodes: list[Metrics] = field(default_factory=list)
    continuations: list[list[int]] = field(repr=False, default_factory=list)
    texts: list[str] = field(repr=False, default_factory=list)
    read_chunks: list[int] = field(default_factory=list)

    @property
    def decode_tput(self) -> float:
        """Generated tokens of all rounds over the wall time of all decode calls, tokens/s."""
        return sum(m.output_tokens for m in self.decodes) / sum(m.duration for m in self.decodes)

    @property
    def all_hits(self) -> bool:
        """Every round was decoded from the cache, by the server's own counter."""
        return all(count == self.expected_chunks for count in self.read_chunks)


def decode_arms(
    ctx: KVCacheContext,
    engine: PostCompletion,
    prompts: Sequence[Sequence[int]],
    edits: Mapping[str, DerivedEdit | EditFunction | None],
    sampling_params: Mapping[str, Any],
    rounds: int = 1,
    settle_seconds: float = 30.0,
    progress: Progress | None = None,
) -> list[Arm]:
    """Prefill all prompts, edit their caches once per arm, then decode from each arm's caches in turn.

    Arms take turns in every round, so that a machine which is slower for a while slows all of them.

    Args:
        ctx: of the LMCache server that the engine uses. Its counters are read: nobody else may use the server.
        engine: as for `create_request`. Keep its own prefix cache off, or the full arm is not read from the server.
        prompts: token ids.
        edits: an edit for each arm's name, None for the unchanged cache.
        sampling_params: of the decode requests; with ``ignore_eos`` all arms generate equally much.
        rounds: how often every arm is decoded.
        settle_seconds: how long to wait for caches that the engine is still storing.
        progress: wraps the iteration over all decode calls.

    Raises:
        MissingKV: the engine's caches did not reach the server.
        KVCacheSDKError: the first stream's error, if any fails: a comparison needs all of them.
    """
    if not prompts or rounds < 1:
        raise InvalidRequest("decode_arms needs prompts, and at least one round")
    arms = [_prepare(ctx, engine, prompts, name, edit, settle_seconds) for name, edit in edits.items()]
    turns: Iterable[Arm] = [arm for _ in range(rounds) for arm in arms]
    for arm in progress(turns, rounds * len(arms)) if progress else turns:
        _decode(ctx, engine, arm, sampling_params)
    return arms


def score_continuations(
    engine: Scorer, ctx: KVCacheContext, arms: Sequence[Arm], progress: Progress | None = None
) -> dict[str, float]:
    """Mean log-probability per token, in nats, that the full cache gives to each arm's continuations.

    The full cache of each prompt is read from the server, and a model continues from it over what the arms wrote.

    Args:
        engine: the same model; need not be the serving engine.
        ctx: of the server.
        arms: the first holds the full cache; all continuations have one length.
    """
    sums = torch.zeros(len(arms), dtype=torch.float64)
    places: Iterable[int] = range(len(arms[0].requests))
    for place in progress(places, len(arms[0].requests)) if progress else places:
        ids, salt = arms[0].requests[place]
        # The last token of the prompt is fed again: it predicts the first of the continuation.
        kv = ctx.retrieve(ids[: len(ids) - 1], salt)
        if kv is None:
            raise MissingKV(f"the full cache of prompt {place} is gone from the server; give it more memory")
        rest = torch.tensor(ids[kv.shape[2] :])
        continuations = torch.tensor([arm.continuations[place] for arm in arms])
        fed = torch.cat([rest.expand(len(arms), -1), continuations], dim=1)
        logits = engine.continue_from(kv.expand(len(arms), *kv.shape), fed)[:, len(rest) - 1 : -1]
        found = torch.log_softmax(logits.float(), -1).gather(-1, continuations[..., None])
        sums += found.mean(dim=(1, 2)).double()
    return {arm.name: float(total) / len(arm.requests) for arm, total in zip(arms, sums, strict=True)}


def decoding_report(arms: Sequence[Arm], logprob: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Plain JSON: throughput of each arm, its gain over the first, hits, and log-probabilities where known."""
    report: dict[str, Any] = {
        "decode_tput": {arm.name: arm.decode_tput for arm in arms},
        "gain": {arm.name: arm.decode_tput / arms[0].decode_tput for arm in arms[1:]},
        "logprob": dict(logprob or {}),
        "read_chunks": {arm.name: sum(arm.read_chunks) for arm in arms},
        "expected_chunks": {arm.name: arm.expected_chunks * len(arm.read_chunks) for arm in arms},
        "rounds": [[metrics.output_tput for metrics in arm.decodes] for arm in arms],
    }
    return report


def chunks_read_since(ctx: KVCacheContext, before: int, expected: int) -> int:
    """Growth of the server's read counter, which follows the engine's answer by a moment: waits until `expected`."""
    deadline = time.monotonic() + _COUNTED_SECONDS
    while True:
        found = counters(ctx.connection.http_url)["retrieved_chunks"] - before
        if found >= expected or time.monotonic() > deadline:
            return found
        time.sleep(_POLL_SECONDS)


def _prepare(
    ctx: KVCacheContext,
    engine: PostCompletion,
    prompts: Sequence[Sequence[int]],
    name: str,
    edit: DerivedEdit | EditFunction | None,
    settle_seconds: float,
) -> Arm:
    batch = _batch(ctx, engine, [(list(prompt), "") for prompt in prompts])
    prefill = _whole(batch.prefill({"temperature": 0.0}))
    modify = None
    for stream, prompt in zip(batch.streams, prompts, strict=True):
        _settle(ctx, prompt, stream.cache_salt, settle_seconds)
    if edit is not None:
        modify = _whole(batch.modify(edit))
    requests = [_request(stream) for stream in batch.streams]
    # An engine reads whole chunks and computes at least the last token itself.
    expected = sum(min(ctx.lookup(ids, salt), len(ids) - 1) // ctx.chunk_size for ids, salt in requests)
    return Arm(name, prefill, modify, requests, expected)


def _decode(ctx: KVCacheContext, engine: PostCompletion, arm: Arm, sampling_params: Mapping[str, Any]) -> None:
    batch = _batch(ctx, engine, arm.requests)
    ctx.settle()  # what was read here before counts before
    before = counters(ctx.connection.http_url)["retrieved_chunks"]
    arm.decodes.append(_whole(batch.decode(sampling_params)))
    arm.read_chunks.append(chunks_read_since(ctx, before, arm.expected_chunks))
    if not arm.continuations:
        arm.continuations = [stream.output_tokens for stream in batch.streams]
        arm.texts = [stream.output_text for stream in batch.streams]


def _batch(ctx: KVCacheContext, engine: PostCompletion, requests: Sequence[Address]) -> LMCacheBatchedStream:
    batch = LMCacheBatchedStream()
    for ids, salt in requests:
        batch.add(create_request(ctx, engine, ids, salt))
    return batch


def _request(stream: LMCacheStream) -> Address:
    return stream.tokens + stream.suffix_tokens, stream.cache_salt


def _settle(ctx: KVCacheContext, tokens: Sequence[int], salt: str, seconds: float) -> None:
    """Wait for what the engine stores after its answer."""
    wanted = ctx.whole_chunks(tokens)
    found = ctx.wait_cached(tokens, salt, seconds)
    if found < wanted:
        raise MissingKV(
            f"{found} of {wanted} tokens reached the server within {seconds:g} s; is the engine connected to it, "
            "and is its memory large enough for all prompts?"
        )


def _whole(metrics: Metrics) -> Metrics:
    for error in metrics.errors.values():
        raise error
    return metrics
