"""Who gets which batch: the same plan for every number of ranks, resumed anywhere."""

from __future__ import annotations

import json
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from kvdata import Prefixes
from kvdata.datasets import KVBatchSampler
from kvdata.errors import InvalidRequest


def corpus(count: int, lengths: tuple[int, ...] = (8,)) -> SimpleNamespace:
    prefixes = Prefixes.of([np.full(lengths[i % len(lengths)], i) for i in range(count)])
    return type("Data", (), {"__len__": lambda self: count, "prefixes": prefixes})()


def ranks(data, world: int, state=None, **options) -> list[list[list[int]]]:
    samplers = [KVBatchSampler(data, num_replicas=world, rank=rank, **options) for rank in range(world)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
    return [list(sampler) for sampler in samplers]


def take(sampler: KVBatchSampler, steps: int) -> list[list[int]]:
    """The first batches, as a loader hands them out."""
    return list(islice(sampler.taken(iter(sampler)), steps))


def in_order(by_rank: list[list[list[int]]]) -> list[int]:
    return list(chain.from_iterable(chain.from_iterable(zip(*by_rank, strict=True))))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rank_steps_equally_and_together_they_see_everything(world):
    data = corpus(50)
    for options in ({}, {"shuffle": True, "seed": 3}, {"drop_last": True}):
        by_rank = ranks(data, world, batch_size=4, **options)
        assert len({len(batches) for batches in by_rank}) == 1
        assert len(by_rank[0]) == len(KVBatchSampler(data, 4, num_replicas=world, rank=0, **options))
        seen = in_order(by_rank)
        if options.get("drop_last"):
            assert seen == list(range(len(seen)))
            assert len(seen) == 12 // world * world * 4
        else:
            assert set(seen) == set(range(50))
            assert len(seen) - 50 <= (world - 1) * 4


def test_the_order_depends_on_seed_and_epoch_alone():
    data = corpus(40)
    alone = in_order(ranks(data, 1, batch_size=5, shuffle=True, seed=7))
    assert in_order(ranks(data, 4, batch_size=5, shuffle=True, seed=7)) == alone
    assert sorted(alone) == list(range(40)) != alone
    other = KVBatchSampler(data, 5, shuffle=True, seed=7)
    other.set_epoch(1)
    assert list(chain.from_iterable(other)) != alone
    assert in_order(ranks(data, 1, batch_size=5, shuffle=True, seed=8)) != alone


@pytest.mark.parametrize("tokens", [None, 64])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (4, 3), (3, 4)])
def test_a_run_resumes_on_any_number_of_ranks_with_no_sample_twice_or_skipped(before, after, tokens):
    data = corpus(61, (8, 16, 24, 9))
    options = {"batch_size": 3, "shuffle": True, "seed": 1, "max_tokens": tokens}
    whole = in_order(ranks(data, 1, **options))
    started = [KVBatchSampler(data, num_replicas=before, rank=r, **options) for r in range(before)]
    steps = 3
    first = in_order([take(sampler, steps) for sampler in started])
    states = [sampler.state_dict() for sampler in started]
    assert all(state == states[0] for state in states)  # any rank's state will do for all
    assert states[0]["cursor"] == len(first)
    rest = in_order(ranks(data, after, states[0], **options))
    assert (first + rest)[:61] == whole
    resumed = KVBatchSampler(data, num_replicas=after, rank=0, **options)
    resumed.load_state_dict(states[0])
    assert len(resumed) == steps + len(list(resumed))  # steps that were taken count, as Lightning counts them


def test_a_resumed_run_may_change_its_batch_size():
    data = corpus(20)
    begun = KVBatchSampler(data, 4)
    take(begun, 2)
    state = begun.state_dict()
    assert in_order(ranks(data, 1, state, batch_size=3)) == list(range(8, 20))


def test_the_end_of_an_epoch_is_the_beginning_of_the_next():
    data = corpus(9)
    sampler = KVBatchSampler(data, 3, shuffle=True, num_replicas=1, rank=0)
    order = take(sampler, 3)
    state = sampler.state_dict()
    assert sorted(chain.from_iterable(order)) == list(range(9))
    assert (state["epoch"], state["cursor"], state["steps"]) == (1, 0, 0)
    resumed = KVBatchSampler(data, 3, shuffle=True, num_replicas=1, rank=0)
    resumed.load_state_dict(state)
    sampler.finish()
    assert list(resumed) == list(sampler)
    take(sampler, 1)
    resumed.load_state_dict(sampler.state_dict())
    assert len(list(resumed)) == 2
    resumed.set_epoch(1)  # what Lightning calls when it goes on in that epoch
    assert len(list(resumed)) == 2
    resumed.set_epoch(2)
    assert len(list(resumed)) == 3


def test_other_prefixes_or_another_order_are_refused():
    data = corpus(12)
    begun = KVBatchSampler(data, 2, shuffle=True)
    take(begun, 1)
    state = begun.state_dict()
    other = corpus(12, (9,))
    for sampler, name in (
        (KVBatchSampler(other, 2, shuffle=True), "prefixes"),
        (KVBatchSampler(data, 2), "shuffle"),
        (KVBatchSampler(data, 2, shuffle=True, seed=1), "seed"),
        (KVBatchSampler(data, 2, shuffle=True, max_tokens=99), "max_tokens"),
    ):
        with pytest.raises(InvalidRequest, match=f"had another {name}"):
            sampler.load_state_dict(state)
    with pytest.raises(InvalidRequest, match="version 2"):
        KVBatchSampler(data, 2, shuffle=True).load_state_dict({**state, "version": 2})
    budgeted = KVBatchSampler(data, max_tokens=16)
    with pytest.raises(InvalidRequest, match="no batch begins at sample 3"):
        budgeted.load_state_dict({**budgeted.state_dict(), "cursor": 3})


def test_batches_of_like_lengths_keep_to_the_budget():
    data = corpus(200, (8, 40, 16, 24))
    lengths = data.prefixes.lengths()
    batches = list(KVBatchSampler(data, max_tokens=80, shuffle=True))
    assert sorted(chain.from_iterable(batches)) == list(range(200))
    for batch in batches:
        assert len(batch) * lengths[batch].max() <= 80
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    assert padded < 1.05 * lengths.sum()
    assert [lengths[batch].max() for batch in batches] != sorted(lengths[batch].max() for batch in batches)
    with pytest.raises(InvalidRequest, match="prefix 1 has 40 tokens"):
        list(KVBatchSampler(data, max_tokens=32))


def test_frameworks_leave_it_alone():
    assert isinstance(KVBatchSampler(corpus(3)), DistributedSampler)
    for bad in ({"batch_size": 0}, {"max_tokens": 0}, {"rank": 1}, {"num_replicas": 2, "rank": 2}):
        with pytest.raises(InvalidRequest):
            KVBatchSampler(corpus(3), **bad)
    with pytest.raises(InvalidRequest, match="needs a dataset with prefixes"):
        KVBatchSampler([1, 2], max_tokens=3)
