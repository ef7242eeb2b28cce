"""`LiveKVDataset` beside vLLM: what traffic computes comes out as samples while it is served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader

from kvdata import LiveKVDataset, collate, worker_init_fn
from kvdata.wire.keys import chunk_hashes
from tests.live.conftest import TAIL
from tests.live.stack import CHUNK, VLLM
from training.text import documentation_windows

SECONDS = 120.0  # ends an iteration in which a sample is missing
Prompts = Callable[[int, int], list[list[int]]]


@pytest.fixture(scope="session")
def fresh(reference) -> Prompts:
    """Prompts of real text that nobody else sends: so many, of 1 .. 3 chunks and `TAIL` tokens."""
    windows = iter(documentation_windows(reference.tokenizer, 4 * CHUNK, TAIL).select(range(40, 120)))

    def prompts(count: int, chunks: int) -> list[list[int]]:
        return [next(windows).tokens.tolist()[: chunks * CHUNK + TAIL] for _ in range(count)]

    return prompts


@contextmanager
def traffic(engine: VLLM, requests: list[tuple[list[int], str | None]]) -> Iterator[None]:
    """Requests served one after another, in a thread, while the block runs."""
    failed: list[Exception] = []

    def serve() -> None:
        try:
            for prompt, salt in requests:
                engine.complete(prompt, max_tokens=1, **({} if salt is None else {"cache_salt": salt}))
        except Exception as exc:
            failed.append(exc)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(SECONDS)
    assert not failed, failed


def whole(prompt: list[int]) -> tuple[int, ...]:
    """The part of a prompt that is cached."""
    return tuple(prompt[: len(prompt) // CHUNK * CHUNK])


def test_what_is_served_comes_out_with_its_kv(engine, connection, fresh):
    """Growing prompts too: only at the length at which they settle, and again when the next turn makes them longer."""
    plain, (turn,) = fresh(3, 3), fresh(1, 1)
    longer = turn[:CHUNK] + plain[0]
    wanted = [whole(prompt) for prompt in (*plain, turn)]
    data = LiveKVDataset(connection=connection, max_seconds=SECONDS)
    samples = {}
    with traffic(engine, [(prompt, None) for prompt in (*plain, turn)]), connection.connect() as ctx:
        for sample in data:
            tokens = tuple(sample["tokens"].tolist())
            assert tokens not in samples
            samples[tokens] = sample
            assert torch.equal(sample["kv"], ctx.retrieve(sample["tokens"]))
            if tokens == whole(turn):
                engine.complete(longer, max_tokens=1)
                wanted.append(whole(longer))
            if set(wanted) <= set(samples):
                break
    assert set(wanted) <= set(samples)
    assert not [t for t in samples if any(t != w and t == w[: len(t)] for w in wanted) and t != whole(turn)]
    assert data.stats()["yielded"] == len(samples)
    assert data.stats()["lost"] == data.stats()["unrooted"] == 0
    data.close()


def test_a_salted_prompt_is_found_through_the_candidates(engine, connection, fresh):
    salted, other = fresh(2, 3)
    data = LiveKVDataset(connection=connection, salts=["tenant-a", "tenant-b"], max_samples=1, max_seconds=SECONDS)
    with traffic(engine, [(other, "tenant-c"), (salted, "tenant-b")]), connection.connect() as ctx:
        (sample,) = data
        assert tuple(sample["tokens"].tolist()) == whole(salted)
        assert sample["meta"] == {"salt": "tenant-b"}
        assert ctx.lookup(salted) == 0
        assert torch.equal(sample["kv"], ctx.retrieve(salted, "tenant-b"))
    data.close()


@pytest.mark.parametrize("workers", [2])
def test_workers_take_no_prefix_twice(engine, connection, fresh, workers):
    """Of one length that no other test uses, the same number for each worker: so that each comes to its end."""
    prompts: list[list[int]] = []
    shares = [0] * workers
    while len(prompts) < 4 * workers:
        (prompt,) = fresh(1, 2)
        share = int.from_bytes(chunk_hashes(prompt, CHUNK)[-1][-8:], "big") % workers
        if shares[share] < 4:
            shares[share] += 1
            prompts.append(prompt)
    data = LiveKVDataset(
        connection=connection,
        min_tokens=len(whole(prompts[0])),
        max_tokens=len(whole(prompts[0])),
        max_samples=len(prompts),
        max_seconds=SECONDS,
    )
    loader = DataLoader(
        data, batch_size=2, num_workers=workers, collate_fn=collate, worker_init_fn=worker_init_fn, in_order=False
    )
    with traffic(engine, [(prompt, None) for prompt in prompts]), connection.connect() as ctx:
        seen = []
        for batch in loader:
            for row, tokens in enumerate(batch.tokens):
                seen.append(tuple(tokens.tolist()))
                assert torch.equal(batch.kv[row], ctx.retrieve(tokens))
    assert sorted(seen) == sorted(map(whole, prompts))
