"""Allocation, eviction and expiry of the embedded server, without sockets and with a clock of the test."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kvdata.server.pool import ALIGNMENT, Pool
from kvdata.server.service import GRACE_SECONDS, REAP_SECONDS, Service
from kvdata.server.store import ChunkStore
from kvdata.wire.messages import CacheKey, Registration
from tests.unit.test_server_wire import CHUNK, Clock, new_tokens

PAGES = 20


def test_allocation_never_overlaps_and_coalesces_again():
    pool, dice = Pool(torch.empty(64 * ALIGNMENT, dtype=torch.uint8)), random.Random(0)
    held: dict[int, int] = {}
    for _ in range(3000):
        if held and dice.random() < 0.5:
            offset = dice.choice(list(held))
            del held[offset]
            pool.release(offset)
        else:
            length = dice.randint(1, 9 * ALIGNMENT)
            for offset in pool.allocate(length, dice.randint(1, 3)) or []:
                held[offset] = -(-length // ALIGNMENT) * ALIGNMENT
        spans = sorted(held.items())
        assert all(offset % ALIGNMENT == 0 for offset in held)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        assert pool.used == sum(held.values()) <= pool.size
    for offset in held:
        pool.release(offset)
    assert pool.used == 0
    assert pool.allocate(pool.size, 1) == [0]
    assert pool.allocate(1, 1) is None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(clock: Clock) -> Service:
    pool = Pool(torch.empty(PAGES * ALIGNMENT, dtype=torch.uint8))
    store = ChunkStore(pool, clock, write_ttl=600, read_ttl=300, watermark=0.8, eviction_ratio=0.2)
    service = Service(store, CHUNK, "lmcache_l1_pool_x", session_ttl=600)
    service.register(registered())
    return service


def registered(instance: int = 1) -> Registration:
    return Registration(instance, "model", 1, 16, 2, 8, "bfloat16", False)


def address(tokens: list[int], request: str = "r", worker: int | None = 0) -> CacheKey:
    return CacheKey("model", 1, worker, tokens, 0, len(tokens), request)


def put(service: Service, tokens: list[int]) -> None:
    service.prepare_store(address(tokens), 1)
    assert service.commit_store(address(tokens), 1, b"")
    service.end_session("r")


def hits(service: Service, tokens: list[int]) -> int:
    """Leading chunks present; leaves no lock and no session behind."""
    service.lookup(address(tokens, "peek", None), 1)
    found = service.query_prefetch_status("peek")
    service.free_lookup_locks(address(tokens, "peek", None), 1)
    service.end_session("peek")
    return found


def test_eviction_takes_the_oldest_and_the_ends_of_prefixes(service):
    old, new = new_tokens(8), new_tokens(7)
    put(service, old)
    put(service, new)
    service.tick()
    assert service.store.pool.used == 15 * ALIGNMENT  # below the watermark
    longer = old[: 4 * CHUNK] + new_tokens(1)
    put(service, longer)
    service.tick()
    assert service.store.status()["total_object_count"] == 13
    assert service.store.evicted == {"": 3}
    service.tick()
    assert service.store.status()["total_object_count"] == 13
    assert (hits(service, new), hits(service, longer), hits(service, old)) == (7, 5, 5)


def test_what_can_still_be_hit_stays_contiguous(service):
    dice, prefixes = random.Random(1), [new_tokens(3)]
    for _ in range(80):
        base = dice.choice(prefixes)
        prefixes.append(base[: dice.randint(0, len(base) // CHUNK) * CHUNK] + new_tokens(dice.randint(1, 2)))
        service.prepare_store(address(prefixes[-1]), 1)
        service.commit_store(address(prefixes[-1]), 1, b"")
        service.end_session("r")
        service.tick()
        reachable = {k for p in prefixes for k in service._range(address(p))[: hits(service, p)]}
        service.end_session("r")
        assert len(reachable) == service.store.status()["total_object_count"]


def test_locked_chunks_are_never_evicted(service, clock):
    tokens = new_tokens(18)
    put(service, tokens)
    service.lookup(address(tokens, "reader", None), 1)
    service.tick()
    assert service.store.status()["total_object_count"] == 18
    clock.now += 301
    service.tick()
    assert service.store.status()["total_object_count"] == 15


def test_expired_reservations_free_their_memory(service, clock):
    service.prepare_store(address(new_tokens(4)), 1)
    clock.now += 599
    service.tick()
    assert service.store.status()["write_locked_count"] == 4
    clock.now += 1
    service.tick()
    assert service.store.pool.used == 0


def test_sessions_and_silent_instances_are_dropped(service, clock):
    service.register(registered(2))
    service.prepare_store(address(new_tokens(1), "open"), 2)
    service.ping(2)
    clock.now += REAP_SECONDS + 1
    service.tick()
    assert list(service.instances) == [1]
    assert service.store.pool.used == 0  # what it had reserved went with it
    assert list(service.sessions) == ["open"]
    clock.now += 600
    service.tick()
    assert service.sessions == {}
    clock.now += GRACE_SECONDS
    service.tick()
    assert service.instances == {}


def test_a_huge_world_costs_nothing(service):
    far = CacheKey("model", 2**62, None, new_tokens(1), 0, CHUNK, "far")
    service.lookup(far, 1)
    service.free_lookup_locks(far, 1)
    assert service.query_prefetch_status("far") == 0
