"""KV events in, prefixes out: in every order in which a server may send them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdata.datasets.chains import ChainCounts, Chains
from kvdata.errors import InvalidRequest, ProtocolError
from kvdata.wire.keys import NONE_HASH, chunk_hashes
from kvdata.wire.messages import KVEvent, KVEventBatch
from tests.unit.conftest import fresh_tokens

CHUNK = 4
SETTLE = 1.0


def stored(tokens: list[int], first: int = 0) -> list[KVEvent]:
    """One event for each whole chunk, from chunk ``first`` on."""
    hashes = chunk_hashes(tokens, CHUNK)
    parents = [None, *hashes]
    return [
        KVEvent(0, "stored", "m", [hashes[i]], parents[i], tokens[i * CHUNK : (i + 1) * CHUNK])
        for i in range(first, len(hashes))
    ]


def removed(*hashes: bytes) -> KVEvent:
    return KVEvent(0, "removed", "m", list(hashes))


def batch(*events: KVEvent, incarnation: int = 1, cursor: int = 0, lost: bool = False) -> KVEventBatch:
    return KVEventBatch(True, incarnation, cursor, lost, list(events))


def given_out(chains: Chains, now: float) -> list[list[int]]:
    """The tokens of all prefixes that have settled."""
    found = []
    while (digest := chains.settled(now)) is not None:
        tokens = chains.tokens(digest)
        assert tokens.dtype == np.int64
        assert len(tokens) == chains.length(digest)
        found.append(tokens.tolist())
    return found


@pytest.fixture
def chains() -> Chains:
    return Chains(SETTLE, 1000)


def test_a_prompt_is_given_out_once_as_a_whole_when_it_has_settled(chains):
    tokens = fresh_tokens(3 * CHUNK)
    assert chains.next_due() is None
    for moment, event in enumerate(stored(tokens)):
        chains.add(batch(event), now=float(moment) / 2)
        assert given_out(chains, moment / 2) == []  # each chunk before the last is followed in time
    assert chains.next_due() == 2.0
    assert given_out(chains, 1.99) == []
    assert given_out(chains, 2.0) == [tokens]
    assert given_out(chains, 1e9) == []
    assert chains.next_due() is None
    assert chains.counts == ChainCounts(events=3)


def test_a_prompt_that_grows_after_it_settled_comes_again_longer(chains):
    tokens = fresh_tokens(4 * CHUNK)
    chains.add(batch(*stored(tokens[: 2 * CHUNK])), 0.0)
    assert given_out(chains, 1.0) == [tokens[: 2 * CHUNK]]
    chains.add(batch(*stored(tokens, first=2)), 5.0)
    assert given_out(chains, 6.0) == [tokens]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_chunks_may_come_in_any_order(chains, order):
    tokens = fresh_tokens(4 * CHUNK)
    events = stored(tokens)
    for moment, place in enumerate(order):
        chains.add(batch(events[place]), float(moment))
        came = set(order[: moment + 1])
        assert chains.counts.waiting == sum(not set(range(place)) <= came for place in came)
    assert given_out(chains, 3.0 + SETTLE)[-1] == tokens
    assert chains.counts.waiting == 0


def test_what_waited_settles_from_when_its_first_chunk_came(chains):
    tokens = fresh_tokens(3 * CHUNK)
    chains.add(batch(*stored(tokens, first=1)), 0.0)
    assert chains.next_due() is None
    assert chains.counts.waiting == 2
    chains.add(batch(*stored(tokens[:CHUNK])), 10.0)
    assert chains.next_due() == 10.0 + SETTLE
    assert given_out(chains, 11.0) == [tokens]


def test_branches_are_prefixes_of_their_own(chains):
    stem = fresh_tokens(2 * CHUNK)
    one, two = stem + fresh_tokens(CHUNK), stem + fresh_tokens(2 * CHUNK)
    chains.add(batch(*stored(one), *stored(two, first=2)), 0.0)
    assert given_out(chains, 1.0) == [one, two]
    three = stem[:CHUNK] + fresh_tokens(CHUNK)
    chains.add(batch(*stored(three)), 2.0)
    assert given_out(chains, 3.0) == [three]
    assert chains.counts.repeated == 1  # the common first chunk


def test_repeats_neither_delay_nor_give_out_again(chains):
    tokens = fresh_tokens(2 * CHUNK)
    chains.add(batch(*stored(tokens), *stored(tokens)), 0.0)
    chains.add(batch(*stored(tokens)), 0.9)
    assert given_out(chains, 1.0) == [tokens]
    chains.add(batch(*stored(tokens)), 2.0)
    assert given_out(chains, 10.0) == []
    assert (chains.counts.events, chains.counts.repeated) == (8, 6)
    assert len(chains) == 2


def test_a_prefix_whose_cache_was_gone_comes_again_when_it_is_stored_again(chains):
    tokens = fresh_tokens(2 * CHUNK)
    chains.add(batch(*stored(tokens)), 0.0)
    digest = chains.settled(1.0)
    assert digest == chunk_hashes(tokens, CHUNK)[-1]
    chains.again(digest)
    assert given_out(chains, 10.0) == []
    chains.add(batch(*stored(tokens)), 10.0)
    assert given_out(chains, 11.0) == [tokens]


def test_a_removal_is_counted_and_leaves_what_others_may_begin_with(chains):
    """It does not say of which salt: another tenant's copy may be meant."""
    tokens = fresh_tokens(2 * CHUNK)
    chains.add(batch(*stored(tokens)), 0.0)
    chains.add(batch(removed(*chunk_hashes(tokens, CHUNK)), removed(bytes(32))), 0.5)
    assert chains.counts.removed == 3
    longer = tokens + fresh_tokens(CHUNK)
    chains.add(batch(*stored(longer, first=2)), 0.6)
    assert given_out(chains, 1.6) == [longer]


def test_removed_chunks_are_forgotten_first():
    chains = Chains(SETTLE, max_chunks=2)
    one, two, three = (fresh_tokens(CHUNK) for _ in range(3))
    chains.add(batch(*stored(one), *stored(two), removed(chunk_hashes(two, CHUNK)[0]), *stored(three)), 0.0)
    assert given_out(chains, 1.0) == [one, three]
    assert chains.counts.dropped == 1


def test_the_bound_takes_old_ends_and_keeps_what_is_shared():
    chains = Chains(SETTLE, max_chunks=6)
    stem = fresh_tokens(2 * CHUNK)
    prompts = [stem + fresh_tokens(2 * CHUNK) for _ in range(5)]
    for moment, prompt in enumerate(prompts):
        chains.add(batch(*stored(prompt)), 10.0 * moment)
        assert len(chains) <= 6
        assert given_out(chains, 10.0 * moment + 1) == [prompt]
    assert chains.counts.dropped == 0  # all of them had been given out
    chains.add(batch(*stored(prompts[0], first=2)), 100.0)
    assert given_out(chains, 200.0) == []  # forgotten, but not that it was given out


def test_what_is_forgotten_before_it_was_given_out_is_counted():
    chains = Chains(SETTLE, max_chunks=4)
    lost_parent, unsettled, last = fresh_tokens(2 * CHUNK), fresh_tokens(2 * CHUNK), fresh_tokens(4 * CHUNK)
    chains.add(batch(*stored(lost_parent, first=1), *stored(unsettled)), 0.0)
    chains.add(batch(*stored(last)), 0.5)
    assert given_out(chains, 2.0) == [last]
    assert chains.counts.dropped == 2  # the waiting chunk, and the prefix that had not settled
    assert chains.counts.waiting == 0
    assert len(chains) == 4


def test_a_chain_longer_than_the_bound_is_dropped_and_counted():
    chains = Chains(SETTLE, max_chunks=3)
    chains.add(batch(*stored(fresh_tokens(8 * CHUNK))), 0.0)
    assert given_out(chains, 10.0) == []
    assert len(chains) == chains.counts.waiting == 3  # of its middle, whose beginning had to go
    assert chains.counts.dropped == 2  # the end that did not fit, and one that waited


def test_a_first_chunk_may_name_the_hash_before_all_others(chains):
    tokens = fresh_tokens(CHUNK)
    (event,) = stored(tokens)
    chains.add(batch(KVEvent(0, "stored", "m", event.block_hashes, NONE_HASH, event.token_ids)), 0.0)
    assert given_out(chains, 1.0) == [tokens]


def test_a_later_chunk_without_its_parent_is_no_first_chunk(chains):
    """The server sends a null parent, too, when it has forgotten the request."""
    tokens = fresh_tokens(2 * CHUNK)
    event = stored(tokens, first=1)[0]
    chains.add(batch(KVEvent(0, "stored", "m", event.block_hashes, None, event.token_ids)), 0.0)
    assert given_out(chains, 10.0) == []
    assert (chains.counts.unrooted, len(chains)) == (1, 0)
    chains.add(batch(*stored(tokens)), 20.0)  # when it comes with its parent, all is well
    assert given_out(chains, 30.0) == [tokens]


def test_tokens_that_are_not_those_of_the_hash_are_refused(chains):
    event = stored(fresh_tokens(CHUNK))[0]
    chains.add(batch(KVEvent(0, "stored", "m", event.block_hashes, None, fresh_tokens(CHUNK))), 0.0)
    assert (chains.counts.unrooted, len(chains)) == (1, 0)


def test_a_lost_marker_counts_what_was_passed_over_and_orphans_wait(chains):
    tokens = fresh_tokens(3 * CHUNK)
    first, _, third = stored(tokens)
    chains.add(batch(first, cursor=1), 0.0)
    chains.add(batch(third, cursor=9, lost=True), 0.5)
    assert (chains.counts.lost, chains.counts.missed, chains.counts.waiting) == (1, 7, 1)
    assert given_out(chains, 1.0) == [tokens[:CHUNK]]
    assert given_out(chains, 9.0) == []
    chains.add(batch(*stored(tokens), cursor=12), 10.0)  # served and stored again
    assert given_out(chains, 11.0) == [tokens]
    assert chains.counts.waiting == 0


def test_a_restart_forgets_the_chunks_but_not_what_was_given_out(chains):
    done, unsettled, orphan = fresh_tokens(CHUNK), fresh_tokens(CHUNK), fresh_tokens(2 * CHUNK)
    chains.add(batch(*stored(done), cursor=100), 0.0)
    assert given_out(chains, 1.0) == [done]
    chains.add(batch(*stored(unsettled), *stored(orphan, first=1), cursor=102), 2.0)
    chains.add(batch(*stored(done), incarnation=2, cursor=1), 2.5)
    assert (chains.counts.incarnations, chains.counts.dropped, chains.counts.waiting) == (1, 2, 0)
    assert len(chains) == 1
    assert given_out(chains, 10.0) == []
    chains.add(batch(incarnation=2, cursor=3, lost=True), 11.0)
    assert chains.counts.missed == 2  # counted from the new server's numbers


def test_counters_go_on_from_one_iteration_to_the_next():
    counts = ChainCounts(events=5, waiting=3)
    chains = Chains(SETTLE, 10, counts)
    chains.add(batch(*stored(fresh_tokens(CHUNK))), 0.0)
    assert counts == ChainCounts(events=6)  # what the last one waited for, it waits for no more


def test_what_is_not_known_is_refused():
    with pytest.raises(InvalidRequest, match="max_chunks"):
        Chains(SETTLE, 0)
    with pytest.raises(InvalidRequest, match="settle_seconds"):
        Chains(-1.0, 10)
    with pytest.raises(ProtocolError, match="names 2 chunks"):
        Chains(SETTLE, 10).add(batch(KVEvent(0, "stored", "m", [b"a", b"b"], None, [1, 2])), 0.0)


@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_any_forest_in_any_order_gives_each_leaf_once(rng: random.Random, prompts: int):
    """Random prompts that share beginnings; events shuffled, repeated and cut into batches at random."""
    known: list[list[int]] = []
    for _ in range(prompts):
        base = rng.choice([[], *known])
        stem = base[: rng.randint(0, len(base) // CHUNK) * CHUNK]
        known.append(stem + fresh_tokens(rng.randint(1, 4) * CHUNK))
    events = [event for prompt in known for event in stored(prompt)]
    events += rng.sample(events, len(events) // 2)
    rng.shuffle(events)
    chains = Chains(SETTLE, 1000)
    while events:
        count = rng.randint(1, 5)
        chains.add(batch(*events[:count]), now=0.0)
        del events[:count]
    leaves = [p for p in known if not any(q != p and q[: len(p)] == p for q in known)]
    assert sorted(given_out(chains, SETTLE)) == sorted(leaves)
    assert chains.counts.waiting == chains.counts.dropped == chains.counts.unrooted == 0


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_any_bound_holds_and_gives_only_true_prefixes(rng: random.Random, bound: int):
    prompts = [fresh_tokens(rng.randint(1, 5) * CHUNK) for _ in range(6)]
    events = [event for prompt in prompts for event in stored(prompt)]
    rng.shuffle(events)
    chains = Chains(0.0, bound)
    found = []
    for event in events:
        chains.add(batch(event), 0.0)
        assert 0 <= chains.counts.waiting <= len(chains) <= bound
        found += given_out(chains, 0.0)
    assert all(any(p[: len(f)] == f for p in prompts) for f in found)
    whole = [p for p in prompts if p in found]
    assert len(found) == len({tuple(f) for f in found})
    assert len(whole) == len(prompts) or chains.counts.dropped or chains.counts.waiting
