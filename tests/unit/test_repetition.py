"""What repeats what, from the first layer's values: against the same questions asked of token ids, by plain loops."""

from __future__ import annotations

import math
import random

import torch

from kvdata.edits.rope import Rope
from kvdata.models.repetition import FEATURES, LONGEST, repetition, same_tokens
from kvdata.models.token_scorer import TokenScorer
from tests.unit.tiny_model import tiny_engine

LAYERS, HEADS, HEAD_DIM = 2, 2, 8
ROPE = Rope.from_config({"head_dim": HEAD_DIM, "rope_theta": 10000.0})


def cache_of(ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``[2, L, T, D]``: the first layer's values tell the tokens, everything else is noise."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, LAYERS, len(ids), HEADS * HEAD_DIM, generator=generator)
    kv[1, 0] = torch.randn(1 + max(ids), HEADS * HEAD_DIM, generator=generator)[ids]
    return kv.to(dtype)


def text(length: int, vocabulary: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(vocabulary) for _ in range(length)]


def passage(ids: list[int], i: int, j: int) -> int:
    """Tokens up to i and up to j that are the same, at most LONGEST."""
    count = 0
    while count < min(LONGEST, min(i, j) + 1) and ids[i - count] == ids[j - count]:
        count += 1
    return count


def test_a_models_own_cache_tells_which_tokens_are_the_same() -> None:
    ids = torch.tensor(text(96, 40))
    kv = tiny_engine().prefill(ids.tolist())
    for stored in (kv, kv.bfloat16(), kv.bfloat16() * (1 + 2e-3 * torch.randn(kv.shape[-1]))):
        assert torch.equal(same_tokens(stored[None, 1, 0])[0].bool(), ids[:, None] == ids)


def test_counts_and_passages_are_those_of_the_ids() -> None:
    ids = text(300, 12)
    found = repetition(cache_of(ids, torch.bfloat16)[None])[0]
    assert found.shape == (300, FEATURES)
    for t in (0, 1, 17, 150, 299):
        before = ids[t - 1] if t else None
        want = [
            math.log(ids.count(ids[t])),
            math.log1p(ids[:t].count(ids[t])),
            math.log1p(ids[t + 1 :].count(ids[t])),
            math.log1p(ids[-64:].count(ids[t])),
            math.log1p(ids[-64:].count(before)),
            math.log1p(ids[-256:].count(ids[t])),
            math.log1p(ids[-256:].count(before)),
            math.log1p(max((passage(ids, t, j) for j in range(t)), default=0)),
            math.log1p(max((passage(ids, t, j) for j in range(t + 1, 300)), default=0)),
        ]
        torch.testing.assert_close(found[t, :9], torch.tensor(want), atol=1e-5, rtol=1e-5)


def test_an_end_that_repeats_a_passage_points_behind_it() -> None:
    ids = list(range(100, 300))
    ids[184:200] = ids[40:56]
    found = repetition(cache_of(ids)[None])[0]
    here, near, far = found[:, 9], found[:, 10], found[:, 11]
    assert here.argmax() == 56
    assert torch.equal(near.nonzero()[:, 0], torch.arange(int(here.nonzero()[0]), int(here.nonzero()[-1]) + 32))
    assert far[56:184].eq(here.max()).all()
    rare = 1 - math.log(2) / math.log(200)
    torch.testing.assert_close(here[56], torch.tensor(sum(min(n, LONGEST) for n in range(1, 17)) / 16 * rare))


def test_a_cache_without_repetitions_has_none() -> None:
    for ids in (list(range(70)), [3]):
        found = repetition(cache_of(ids)[None])
        assert found[..., [0, 1, 2, *range(7, FEATURES)]].eq(0).all()
        assert found[..., 3:7].max() == math.log(2)  # each is once among the last tokens


def test_neighbours_count_for_the_average() -> None:
    ids = [*range(10, 60), *[1] * 50]
    found = repetition(cache_of(ids)[None])[0]
    assert found[45, 0] == 0
    torch.testing.assert_close(found[45, 15], torch.tensor(6 / 21 * math.log(50)))


def test_caches_of_a_batch_are_independent() -> None:
    kv = torch.stack([cache_of(text(64, 9, seed)) for seed in (1, 2, 3)])
    torch.testing.assert_close(repetition(kv)[1], repetition(kv[1:2])[0])


def test_a_scorer_sees_what_repeats() -> None:
    """Two caches that differ only in which tokens are the same: the other layers and the keys do not tell."""
    torch.manual_seed(0)
    scorer = TokenScorer(LAYERS, HEADS, 2 * HEADS, HEAD_DIM, ROPE, width=16).eval()
    once, again = cache_of(list(range(64))), cache_of([*range(32), *range(32)])
    again[:, 1:] = once[:, 1:]
    again[0] = once[0]
    last = [scorer(kv[None], torch.tensor([10]))[0, -1] for kv in (once, again)]
    assert not torch.allclose(*last)
