"""Buffers that are used again, the loader with threads, and batches out of workers."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from kvdata import KVCacheDataset, collate, worker_init_fn
from kvdata.datasets import KVBatchSampler, KVDataLoader, KVLoader, ring
from kvdata.datasets.buffers import Buffers
from kvdata.errors import InvalidRequest, MissingKV, ServerUnreachable
from tests.unit.conftest import fresh_tokens, random_kv

COUNT, TOKENS = 12, 64


@pytest.fixture
def filled(connection):
    """``(dataset, caches)`` of equally long prefixes."""
    prompts, caches = [fresh_tokens(TOKENS) for _ in range(COUNT)], [random_kv(TOKENS) for _ in range(COUNT)]
    with connection.connect() as ctx:
        for prompt, kv in zip(prompts, caches, strict=True):
            ctx.store(kv, prompt)
    dataset = KVCacheDataset(prompts, connection=connection)
    yield dataset, caches
    dataset.close()


def assert_exact(batch, caches) -> None:
    for row, index in enumerate(batch.index.tolist()):
        assert torch.equal(batch.kv[row], caches[index])


# -- buffers ------------------------------------------------------------------------------------------


def test_a_buffer_is_used_again_when_its_last_tensor_is_gone():
    buffers = Buffers()
    first = buffers((2, 3), torch.float32)
    row, address = first[1], first.data_ptr()
    del first
    second = buffers((2, 3), torch.float32)
    assert second.data_ptr() != address  # `row` still sees the first
    row.fill_(1.0)
    del row
    third = buffers((3,), torch.bfloat16)
    assert third.data_ptr() == address
    assert (third.shape, third.dtype) == ((3,), torch.bfloat16)


def test_small_buffers_make_room_for_larger_ones():
    buffers = Buffers(keep=1)
    for size in (10, 1000):
        tensor = buffers((size,), torch.uint8)
        address = tensor.data_ptr()
        del tensor
    held = [buffers((1000,), torch.uint8) for _ in range(3)]
    assert held[0].data_ptr() == address
    del held
    assert len(buffers._free) == 1
    assert buffers((0, 4), torch.uint8).shape == (0, 4)


# -- threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_come_in_order_and_stay_valid_while_held(filled, threads):
    dataset, caches = filled
    loader = KVLoader(dataset, batch_size=2, threads=threads, prefetch=3)
    for _ in range(2):
        batches = list(loader)  # held all together: no buffer may be used twice
        assert [b.index.tolist() for b in batches] == [[i, i + 1] for i in range(0, COUNT, 2)]
        for batch in batches:
            assert_exact(batch, caches)
        del batches
    assert len(loader) == COUNT // 2
    assert loader.stats()["samples"] == 2 * COUNT
    assert loader.stats()["wait_seconds"] > 0


def test_buffers_are_as_many_as_are_prefetched_and_two_more(filled):
    dataset, _ = filled
    loader = KVLoader(dataset, batch_size=1, prefetch=2)
    seen = {batch.kv.data_ptr() for _ in range(5) for batch in loader}
    assert len(seen) <= 4


def test_shuffles_agree_with_the_sampler_and_epochs_follow_each_other(filled):
    dataset, _ = filled
    loader = KVLoader(dataset, batch_size=5, shuffle=True, seed=4)
    sampler = KVBatchSampler(dataset, 5, shuffle=True, seed=4)
    first = [b.index.tolist() for b in loader]
    assert first == list(sampler)
    sampler.set_epoch(1)
    assert [b.index.tolist() for b in loader] == list(sampler) != first


class Gate:
    """A dataset whose batches are let through one by one."""

    def __init__(self, count: int, size: int = 8) -> None:
        self.count, self.size = count, size
        self.begun: list[int] = []
        self.open = [threading.Event() for _ in range(count)]

    def __len__(self) -> int:
        return self.count

    def batch_bytes(self, indices):
        return self.size * len(indices)

    def fetch(self, indices, allocate):
        self.begun.append(indices[0])
        assert self.open[indices[0]].wait(timeout=20)
        return list(indices)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(("limit", "ahead"), [(None, 3), (16, 2), (1, 1)])
def test_prefetch_is_bounded_by_batches_and_bytes(limit, ahead):
    gate = Gate(9)
    loader = KVLoader(gate, collate_fn=list, threads=4, prefetch=3, prefetch_bytes=limit)
    batches = iter(loader)
    gate.open[0].set()
    assert next(batches) == [0]
    until(lambda: len(gate.begun) == 1 + ahead)
    for number in range(1, 1 + ahead):
        gate.open[number].set()
        assert len(gate.begun) <= ahead + number
        assert next(batches) == [number]
    for event in gate.open:
        event.set()
    assert [batch[0] for batch in batches] == list(range(1 + ahead, 9))


def test_an_interrupted_pass_ends_its_threads(filled):
    dataset, _ = filled
    for batch in KVLoader(dataset, batch_size=2):
        assert len(batch) == 2
        break
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("kvdata-fetch")]


def test_errors_are_raised_at_their_place(filled):
    dataset, caches = filled
    with dataset.connection.connect() as ctx:
        ctx.delete(dataset.prefixes[5].tokens)
    batches = iter(KVLoader(dataset, batch_size=2))
    assert_exact(next(batches), caches)
    assert_exact(next(batches), caches)
    with pytest.raises(MissingKV, match="prefix 5"):
        next(batches)
    for wrong in ({"threads": 0}, {"prefetch": 0}):
        with pytest.raises(InvalidRequest):
            KVLoader(dataset, **wrong)


def test_workers_end_with_the_error_of_one(filled):
    """And not at a garbage collection, which would wait for them wherever it happens to run."""
    dataset, caches = filled
    with dataset.connection.connect() as ctx:
        ctx.delete(dataset.prefixes[1].tokens)
    gc.collect()
    gc.disable()
    try:
        batches = iter(KVDataLoader(dataset, batch_size=1, num_workers=2))
        assert_exact(next(batches), caches)
        with pytest.raises(MissingKV, match="prefix 1"):
            next(batches)
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


@pytest.mark.parametrize("limit", [None, 10])
def test_errors_before_a_batch_is_read_arrive_as_they_are(filled, connection, limit):
    dataset, _ = filled
    with pytest.raises(InvalidRequest, match="more than max_tokens=8"):
        next(iter(KVLoader(dataset, max_tokens=8, prefetch_bytes=limit)))
    nobody = replace(connection, url="tcp://127.0.0.1:1", http_url="http://127.0.0.1:1", timeout=2.0)
    lost = KVCacheDataset(dataset.prefixes, connection=nobody)
    with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:1"):
        next(iter(KVLoader(lost, prefetch_bytes=limit)))


def test_a_loader_resumes_behind_the_last_batch_it_handed_out(filled):
    dataset, _ = filled
    options = {"batch_size": 2, "shuffle": True, "seed": 9}
    every = [b.index.tolist() for b in KVLoader(dataset, **options)]
    loader = KVLoader(dataset, **options)
    batches = iter(loader)
    assert [next(batches).index.tolist() for _ in range(2)] == every[:2]
    state = loader.state_dict()
    batches.close()
    resumed = KVLoader(dataset, threads=1, **options)
    resumed.load_state_dict(state)
    assert len(resumed) == len(every)
    assert [b.index.tolist() for b in resumed] == every[2:]
    assert len(list(resumed)) == len(every)  # the next epoch is whole


# -- workers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_hand_batches_over_in_shared_buffers(filled, method):
    dataset, caches = filled
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=KVBatchSampler(dataset, 2),
        num_workers=2,
        collate_fn=collate,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    for _ in range(3):
        for batch in loader:
            assert_exact(batch, caches)
            del batch
    mapped = len(ring._received)
    assert 2 <= mapped <= 2 * ring.RING_BUFFERS
    held = list(loader)  # more than the rings hold, or as many: none is overwritten
    held += list(loader)
    held += list(loader)
    for batch in held:
        assert_exact(batch, caches)
    assert dataset.stats()["samples"] == 6 * COUNT
    del held, batch
    loader._iterator._shutdown_workers()
    ring._forget_ended()
    assert not ring._received


def test_a_batch_of_ones_own_collate_is_copied_out_of_the_ring(filled):
    dataset, caches = filled
    loader = DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=dict_of_tensors, worker_init_fn=worker_init_fn)
    held = list(loader)
    for batch in held:
        for row, index in enumerate(batch["index"]):
            assert torch.equal(batch["kv"][row], caches[index])


def dict_of_tensors(samples):
    return {"kv": [s["kv"] for s in samples], "index": [s["index"] for s in samples]}
