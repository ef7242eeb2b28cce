"""`LiveKVDataset` on the embedded server's caches, with a stream of events in front of it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from kvdata import Connection, KVCacheContext, LiveKVDataset, collate, worker_init_fn
from kvdata.errors import InvalidRequest, UnsupportedServer
from kvdata.server import EmbeddedServer
from kvdata.wire.keys import chunk_hashes
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv
from tests.unit.fake_events import EventServer

MINUTE = 60.0  # ends an iteration in which a sample is missing, so that the test fails


@pytest.fixture
def server(embedded: EmbeddedServer) -> Iterator[EventServer]:
    running = EventServer(embedded)
    yield running
    running.stop()


@pytest.fixture
def connection(server: EventServer) -> Connection:
    return Connection(server.url, server.http_url, "unit/model", 30.0, LAYOUT)


def fill(server: EventServer, ctx: KVCacheContext, tokens: list[int], salt: str = "") -> torch.Tensor:
    """Store and report a prompt; returns its KV."""
    kv = random_kv(len(tokens))
    ctx.store(kv, tokens, salt)
    server.store(tokens)
    return kv


def live(connection: Connection, **options) -> LiveKVDataset:
    return LiveKVDataset(connection=connection, **{"settle_seconds": 0.05, "max_seconds": MINUTE, **options})


def test_prefixes_come_as_traffic_fills_the_cache(server, ctx, connection):
    data = live(connection)
    prompts = [fresh_tokens(length) for length in (64, 32, 96)]
    samples = iter(data)
    for number, prompt in enumerate(prompts):
        kv = fill(server, ctx, prompt + fresh_tokens(7))  # the end is no whole chunk
        sample = next(samples)
        assert torch.equal(sample["kv"], kv[:, :, : len(prompt)])
        assert sample["tokens"].tolist() == prompt
        assert (sample["index"], sample["hit_tokens"], sample["meta"]) == (number, len(prompt), {"salt": ""})
        assert sample["continuation"].tolist() == []
    samples.close()
    server.until(lambda: server.cancels == 1)
    assert data.stats()["yielded"] == 3
    assert data.stats()["events"] == 6
    data.close()


def test_what_the_server_holds_already_comes_first_in_each_iteration(server, ctx, connection):
    prompts = [fresh_tokens(64), fresh_tokens(32)]
    for prompt in prompts:
        fill(server, ctx, prompt)
    data = live(connection, max_samples=2)
    for _ in range(2):
        assert [sample["tokens"].tolist() for sample in data] == prompts
    assert data.stats()["yielded"] == 4
    data.close()


def test_samples_are_batched_like_any_others(server, ctx, connection):
    kept = {tuple(prompt): fill(server, ctx, prompt) for prompt in (fresh_tokens(n) for n in (64, 96, 32, 32))}

    def marked(sample):
        return {**sample, "meta": {**sample["meta"], "number": sample["index"]}}

    data = live(connection, max_samples=4, layers=[1], dtype=torch.float32, transform=marked)
    for batch in DataLoader(data, batch_size=2, collate_fn=collate):
        assert [meta["number"] for meta in batch.meta] == batch.index.tolist()
        for row, length in enumerate(batch.lengths.tolist()):
            kv = kept.pop(tuple(batch.tokens[row, :length].tolist()))
            assert torch.equal(batch.kv[row, :, :, :length], kv[:, 1:2].float())
    assert kept == {}
    data.close()


def test_lengths_filter(server, ctx, connection):
    short, right, long = fresh_tokens(32), fresh_tokens(64), fresh_tokens(96)
    for prompt in (short, long, right):
        fill(server, ctx, prompt)
    data = live(connection, min_tokens=64, max_tokens=64, max_samples=1)
    assert [sample["tokens"].tolist() for sample in data] == [right]
    assert data.stats()["filtered"] == 2
    data.close()


def test_other_models_are_not_ours(server, ctx, connection):
    server.store(fresh_tokens(64), model="another/model")
    prompt = fresh_tokens(32)
    fill(server, ctx, prompt)
    data = live(connection, max_samples=1)
    assert [sample["tokens"].tolist() for sample in data] == [prompt]
    assert data.stats()["evicted"] == 0
    data.close()


def test_a_lookup_decides_on_the_salt(server, ctx, connection):
    """Not the salt of a prompt's beginning, which another tenant has too."""
    stem = fresh_tokens(32)
    plain, tenant, stranger = (stem + fresh_tokens(32) for _ in range(3))
    kept = {"": fill(server, ctx, plain), "a": fill(server, ctx, tenant, "a")}
    fill(server, ctx, stranger, "unknown")
    last = fresh_tokens(32)
    fill(server, ctx, last, "b")
    data = live(connection, salts=["a", "b", ""], max_samples=3)
    samples = {sample["meta"]["salt"]: sample for sample in data}
    assert set(samples) == {"", "a", "b"}
    assert all(torch.equal(samples[salt]["kv"], kv) for salt, kv in kept.items())
    assert samples["b"]["tokens"].tolist() == last
    assert data.stats()["evicted"] == 1
    data.close()


def test_an_evicted_prefix_is_skipped_and_comes_when_it_is_there_again(server, ctx, connection):
    gone, here = fresh_tokens(64), fresh_tokens(32)
    server.store(gone)  # it was, and is no more
    fill(server, ctx, here)
    data = live(connection)
    samples = iter(data)
    assert next(samples)["tokens"].tolist() == here
    assert data.stats()["evicted"] == 1
    kv = fill(server, ctx, gone)
    sample = next(samples)
    assert sample["tokens"].tolist() == gone
    assert torch.equal(sample["kv"], kv)
    samples.close()
    data.close()


def test_a_restart_is_survived_and_nothing_comes_twice(server, ctx, connection):
    first, second = fresh_tokens(64), fresh_tokens(32)
    data = live(connection, max_samples=2)
    samples = iter(data)
    fill(server, ctx, first)
    assert next(samples)["tokens"].tolist() == first
    server.restart()
    server.store(first)
    fill(server, ctx, second)
    assert [sample["tokens"].tolist() for sample in samples] == [second]
    assert data.stats()["incarnations"] == 1
    data.close()


def test_it_ends_in_time(connection):
    data = live(connection, max_seconds=0.1)
    assert list(data) == []
    assert list(live(connection, max_samples=0)) == []
    data.close()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_share_the_prefixes(server, ctx, connection, start):
    """Six for each: so that both come to their end, and would have taken the other's first."""
    prompts: list[list[int]] = []
    shares = [0, 0]
    while len(prompts) < 12:
        prompt = fresh_tokens(32 * (1 + len(prompts) % 3))
        share = int.from_bytes(chunk_hashes(prompt, 32)[-1][-8:], "big") % 2
        if shares[share] < 6:
            shares[share] += 1
            prompts.append(prompt)
            fill(server, ctx, prompt)
    loader = DataLoader(
        live(connection, max_samples=12),
        batch_size=2,
        num_workers=2,
        collate_fn=collate,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=start,
    )
    tokens, indices = [], []
    for batch in loader:
        indices += batch.index.tolist()
        tokens += [row[mask].tolist() for row, mask in zip(batch.tokens, batch.mask, strict=True)]
    assert sorted(tokens) == sorted(prompts)
    assert sorted(indices) == list(range(12))
    assert server.cursors == [0, 0]
    server.until(lambda: server.cancels == 2)


def test_workers_share_the_number_of_samples(server, ctx, connection):
    for _ in range(40):
        fill(server, ctx, fresh_tokens(32))
    loader = DataLoader(live(connection, max_samples=5), batch_size=None, num_workers=2)
    assert sorted(sample["index"] for sample in loader) == [0, 1, 2, 3, 4]


def test_it_pickles_without_its_connection(connection):
    data = live(connection)
    assert pickle.loads(pickle.dumps(data)).connection == connection


def test_a_server_without_events_is_refused(embedded):
    data = LiveKVDataset(embedded.url, embedded.http_url, "unit/model", 30.0, LAYOUT)
    with pytest.raises(UnsupportedServer, match=r"0\.5\.6"):
        next(iter(data))


def test_arguments_are_checked(connection):
    with pytest.raises(InvalidRequest, match="salts"):
        live(connection, salts="abc")
    with pytest.raises(InvalidRequest, match="salts"):
        live(connection, salts=[])
    with pytest.raises(InvalidRequest, match="not allowed"):
        live(connection, salts=["a@b"])
    with pytest.raises(InvalidRequest, match="settle_seconds"):
        live(connection, settle_seconds=-1)
