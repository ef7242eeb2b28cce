"""Metrics against their definitions, and a report a person and a program can read."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch
from rich.console import Console

from kvdata import KVCacheDataset
from kvdata.edits.policies import Sees
from kvdata.evaluation import PolicyCaches, Result, evaluate_caches, print_table, save_json, save_plot
from kvdata.evaluation.metrics import kl_divergence, mean_interval, next_token_nll, top1_agreement
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
    reference, dropped = evaluate_caches(Echo(), caches, batch_size=2)

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
    for data in (full, half, other):
        data.close()


def rows() -> list[Result]:
    def row(policy, keep, delta, **kind):
        kind = {"trained": False, "sees": Sees.CACHE, **kind}
        return Result(policy, keep, 2 + delta, delta, (delta - 0.01, delta + 0.01), 0.1, 0.9, 128, 10**6, **kind)

    return [
        row("full", 1.0, 0.0),
        row("keydiff", 0.5, 0.10),
        row("keydiff", 0.25, 0.3),
        row("learned", 0.5, 0.05, trained=True),
        row("learned", 0.25, 0.15, trained=True),
        row("oracle", 0.5, -0.01, sees=Sees.FUTURE),
        row("oracle", 0.25, 0.02, sees=Sees.FUTURE),
    ]


def test_the_table_puts_the_learned_policy_against_its_best_rival():
    console = Console(width=80, record=True, file=io.StringIO())
    print_table(rows(), console, "title")
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    half, quarter = text.split("keep 0.25")
    learned = next(line for line in quarter.splitlines() if "learned" in line)
    assert learned.split()[:3] == ["learned", "2.150", "+0.150"]
    assert learned.split()[-1] == "0.50"  # 0.15 / 0.30
    assert "0.50" in next(line for line in half.split("keep 0.5")[1].splitlines() if "learned" in line)


def test_json_and_plot_are_written(tmp_path):
    save_json({"results": rows(), "model": "m"}, tmp_path / "new" / "report.json")
    found = json.loads((tmp_path / "new" / "report.json").read_text())
    assert found["results"][1]["ci90"] == [pytest.approx(0.09), pytest.approx(0.11)]
    assert set(found["results"][0]) == {
        *("policy", "keep", "nll", "delta_nll", "ci90", "kl", "top1", "kept_tokens", "stored_bytes", "trained"),
        "sees",
    }
    save_plot(rows(), tmp_path / "report.png", "title")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
