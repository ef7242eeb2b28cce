"""Metrics against their definitions, and caches that a server holds already."""

from __future__ import annotations

import math

import pytest
import torch

from kvdata import KVCacheDataset
from kvdata.edits.policies import Sees
from kvdata.evaluation import PolicyCaches, evaluate_caches, summarise
from kvdata.evaluation.metrics import (
    kl_divergence,
    mean_interval,
    next_token_nll,
    ratio_interval,
    scored,
    share_interval,
    top1_agreement,
)
from tests.unit.conftest import fresh_tokens, random_kv


def test_nll_scores_each_token_but_the_first():
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 2] = math.log(3)  # probability 3/6 for token 2, then uniform 1/4
    found = next_token_nll(logits, torch.tensor([[0, 2, 1]]))
    assert found.tolist() == pytest.approx([(math.log(2) + math.log(4)) / 2])


def test_kl_and_agreement_against_plain_formulas():
    a, b = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    p, q = a.softmax(-1)[:, :-1], b.softmax(-1)[:, :-1]
    assert torch.allclose(kl_divergence(a, b), (p * (p / q).log()).sum(-1).mean(1), atol=1e-6)
    assert kl_divergence(a, a).abs().max() < 1e-6
    assert top1_agreement(a, a).tolist() == [1, 1]
    assert top1_agreement(a, -a).tolist() == [0, 0]


def test_interval_covers_the_mean_and_shrinks():
    few, many = mean_interval([0.0, 1.0] * 4), mean_interval([0.0, 1.0] * 100)
    assert few[0] < many[0] < 0.5 < many[1] < few[1]
    assert mean_interval([0.25, 0.25]) == (0.25, 0.25)
    assert mean_interval([0.0, 1.0] * 4) == few


def test_a_cue_is_given_and_not_scored():
    logits, ids = torch.randn(1, 6, 4), torch.tensor([[0, 1, 2, 3, 0, 1]])
    given, rest = scored(logits, ids, 3)
    each = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    assert next_token_nll(given, rest).item() == pytest.approx(float(each[2:].mean()), rel=1e-5)
    assert torch.equal(scored(logits, ids, 1)[0], logits)


def test_a_ratio_is_paired_by_window():
    own, other = [0.1, 0.4, 0.2, 0.3], [0.2, 0.8, 0.4, 0.6]
    assert ratio_interval(own, other) == pytest.approx((0.5, 0.5))  # in every resample, though both vary
    low, high = ratio_interval(own, list(reversed(other)))
    assert low < 0.5 < high
    assert ratio_interval([1.0, 1.0], [2.0, 2.0]) == (0.5, 0.5)


def test_a_share_has_an_interval_at_the_ends_too():
    low, high = share_interval(20, 20)
    assert 0.8 < low < 1 == high
    # Wilson: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), p = 0.5, z = 1.645
    z, n = 1.6449, 40
    half = z * math.sqrt(0.25 / n + z * z / (4 * n * n)) / (1 + z * z / n)
    assert share_interval(20, n) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-4)


class Echo:
    """An engine whose logits depend on the cache's mean only, so that results can be computed by hand."""

    def continue_from(self, kv, continuation, start_position=None):
        logits = torch.zeros(*continuation.shape, 4)
        logits[..., 1] = kv.float().mean((1, 2, 3, 4))[:, None]
        return logits


def test_caches_are_read_back_and_compared_window_by_window(connection):
    sources = [fresh_tokens(64) for _ in range(3)]
    continuation = [1, 1, 1]
    with connection.connect() as ctx:
        for i, source in enumerate(sources):
            ctx.store(torch.full_like(random_kv(64), 1.0 + i), source)
            ctx.store(torch.full_like(random_kv(32), 0.5 * i), source[:32], "dropped")
    full = KVCacheDataset([{"tokens": s, "continuation": continuation} for s in sources], connection=connection)
    half = KVCacheDataset(
        [{"tokens": s[:32], "continuation": continuation} for s in sources], connection=connection, cache_salt="dropped"
    )
    caches = [PolicyCaches("full", 1.0, full), PolicyCaches("half", 0.5, half, trained=True)]
    reference, dropped = summarise(evaluate_caches(Echo(), caches, batch_size=2))

    def nll(x: float) -> float:
        return math.log(math.exp(x) + 3) - x

    deltas = [nll(0.5 * i) - nll(1.0 + i) for i in range(3)]
    assert reference.nll == pytest.approx(sum(nll(1.0 + i) for i in range(3)) / 3, rel=1e-5)
    assert (reference.delta_nll, reference.kl, reference.top1) == (0, pytest.approx(0, abs=1e-6), 1)
    assert dropped.delta_nll == pytest.approx(sum(deltas) / 3, rel=1e-5)
    assert dropped.ci90[0] < dropped.delta_nll < dropped.ci90[1]
    assert (dropped.kept_tokens, dropped.trained, dropped.sees) == (32, True, Sees.CACHE)
    assert dropped.stored_bytes == 3 * 32 * ctx.connection.layout.token_bytes
    other = KVCacheDataset([{"tokens": s, "continuation": [1, 2, 3]} for s in sources], connection=connection)
    with pytest.raises(ValueError, match="same windows"):
        evaluate_caches(Echo(), [caches[0], PolicyCaches("other", 1.0, other)])
    with pytest.raises(ValueError, match="must be the full ones"):
        evaluate_caches(Echo(), caches[1:])
    for data in (full, half, other):
        data.close()
