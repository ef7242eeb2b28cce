"""Continuations of one cache sampled together, and gradients into a cache, on a tiny random Llama."""

from __future__ import annotations

import pytest
import torch

from kvdata.engines.huggingface import HuggingFaceEngine
from kvdata.engines.sampling import first_tokens, sample_continuations
from kvdata.errors import InvalidRequest
from tests.unit.tiny_model import tiny_engine

VOCAB = 97


@pytest.fixture(scope="module")
def engine() -> HuggingFaceEngine:
    return tiny_engine(initializer_range=0.3)  # peaky attention, so that what a cache holds matters


def fresh_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_branches_are_sampled_as_if_each_were_alone(engine):
    kv = engine.prefill(fresh_ids(40, seed=3))
    starts = [fresh_ids(n, seed=n) for n in (1, 4, 2)]
    cold = 1e-4  # so that sampling is the choice of the likeliest
    together = sample_continuations(engine, kv, starts, 12, temperature=cold)
    for row, start in zip(together, starts, strict=True):
        assert row[: len(start)].tolist() == start
        want = engine.continue_from(kv, row[:-1]).argmax(-1)[len(start) - 1 :]
        assert row[len(start) :].tolist() == want.tolist()


def test_sampling_follows_the_models_distribution(engine):
    ids = fresh_ids(40, seed=3)
    kv = engine.prefill(ids)
    drawn = first_tokens(engine, kv, ids[-1], 4000, torch.Generator().manual_seed(0))
    want = engine.continue_from(kv[:, :, :-1], ids[-1:])[0].softmax(-1)
    assert drawn.shape == (4000, 1)
    found = torch.bincount(drawn[:, 0], minlength=VOCAB) / 4000
    assert (found - want).abs().max() < 0.03
    again = first_tokens(engine, kv, ids[-1], 4000, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)


def test_starts_must_fit(engine):
    kv = engine.prefill(fresh_ids(40))
    with pytest.raises(InvalidRequest, match="1 to 3"):
        sample_continuations(engine, kv, [[1], [1, 2, 3, 4]], 3)
    with pytest.raises(InvalidRequest, match="1 to 3"):
        sample_continuations(engine, kv, [[]], 3)


def test_logits_carry_gradients_into_the_cache_and_are_those_of_continue_from(engine):
    kv = engine.prefill(fresh_ids(40)).float().requires_grad_()
    ids = torch.tensor(fresh_ids(6, seed=2))
    logits = engine.logits(kv, ids)
    assert torch.equal(logits.detach(), engine.continue_from(kv.detach(), ids))
    logits.logsumexp(-1).sum().backward()
    assert (kv.grad.abs().amax(dim=(0, 3)) > 0).all()
