"""Prefixes, the dataset, its batches and its start in workers."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from kvdata import Connection, KVBatch, KVCacheDataset, Prefixes, PrefixRecord, collate
from kvdata.datasets.workers import _kv_datasets
from kvdata.errors import InvalidRequest, MissingKV
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv


@pytest.fixture
def filled(connection):
    """Four cached prefixes of different lengths: ``(records, caches, connection)``."""
    records, caches = [], []
    with connection.connect() as ctx:
        for i, length in enumerate((64, 96, 64, 40)):
            records.append({"tokens": fresh_tokens(length), "continuation": list(range(i + 1)), "meta": {"n": i}})
            caches.append(random_kv(length))
            ctx.store(caches[-1], records[-1]["tokens"])
    return records, caches, connection


def dataset(filled, **options) -> KVCacheDataset:
    return KVCacheDataset(filled[0], connection=filled[2], **options)


def test_a_sample_says_what_it_is(filled):
    data = dataset(filled)
    sample = data[3]
    assert sample["kv"].shape == (2, 3, 32, 16)  # 40 tokens are one whole chunk of 32
    assert torch.equal(sample["kv"], filled[1][3][:, :, :32])
    assert sample["tokens"].tolist() == filled[0][3]["tokens"][:32]
    assert (sample["index"], sample["hit_tokens"], sample["meta"]) == (3, 32, {"n": 3})
    assert sample["continuation"].tolist() == [*filled[0][3]["tokens"][32:], 0, 1, 2, 3]
    data.close()


def test_a_batch_is_one_buffer_that_collate_does_not_copy(filled):
    data = dataset(filled)
    samples = data.__getitems__([1, 0, 2])
    batch = collate(samples)
    assert batch.kv.data_ptr() == samples[0]["kv"].data_ptr()
    assert batch.kv.shape == (3, 2, 3, 96, 16)
    assert batch.lengths.tolist() == [96, 64, 64]
    assert batch.index.tolist() == [1, 0, 2]
    for row, index in enumerate((1, 0, 2)):
        length = int(batch.lengths[row])
        assert torch.equal(batch.kv[row, :, :, :length], filled[1][index])
        assert not batch.kv[row, :, :, length:].any()
        assert batch.tokens[row, :length].tolist() == filled[0][index]["tokens"]
        assert batch.mask[row].tolist() == [True] * length + [False] * (96 - length)
        assert batch.continuation[row, batch.continuation_mask[row]].tolist() == list(range(index + 1))
    data.close()


def test_samples_from_anywhere_are_collated_alike(filled):
    data = dataset(filled)
    together, alone = collate(data.__getitems__([0, 1, 3])), collate([data[0], data[1], data[3]])
    assert torch.equal(together.kv, alone.kv)
    assert torch.equal(together.mask, alone.mask)
    shuffled = data.__getitems__([0, 1, 3])[::-1]
    assert torch.equal(collate(shuffled).kv, together.kv.flip(0))
    data.close()


def test_layers_dtype_and_transform(filled):
    def halve(sample):
        return {**sample, "kv": sample["kv"][:, :, ::2]}

    data = dataset(filled, layers=[2, 0], dtype=torch.float32, transform=halve)
    batch = collate(data.__getitems__([0, 2]))
    assert batch.kv.dtype == torch.float32
    assert torch.equal(batch.kv[1], filled[1][2][:, [2, 0], ::2].float())
    assert torch.equal(data[0]["kv"], batch.kv[0])
    data.close()


def test_missing_prefixes_raise_are_skipped_or_counted(filled):
    records, caches, connection = filled
    extended = [*records, {"tokens": records[1]["tokens"] + fresh_tokens(32)}, {"tokens": fresh_tokens(64)}]
    strict = KVCacheDataset(extended, connection=connection)
    found = strict.coverage()
    assert (found.hit, found.partial, found.missing) == ([0, 1, 2, 3], [4], [5])
    assert str(found) == "4 of 6 cached, 1 partly, 1 missing"
    with pytest.raises(MissingKV, match="prefix 4: 96 of 128 tokens are cached"):
        strict.__getitems__([0, 4])
    skipping = KVCacheDataset(extended, connection=connection, on_missing="skip")
    batch = collate(skipping.__getitems__([5, 4, 1]))  # the next ones in order that are not in the batch: 0 and 2
    assert batch.index.tolist() == [0, 2, 1]
    for row, index in enumerate(batch.index.tolist()):
        assert torch.equal(batch.kv[row, :, :, : len(records[index]["tokens"])], caches[index])
    with pytest.raises(MissingKV, match="none of a batch's 1"):
        skipping[5]
    stats = skipping.stats()
    assert (stats["samples"], stats["hits"], stats["partial_hits"], stats["misses"]) == (3, 1, 1, 2)
    assert (stats["skipped"], stats["substituted"]) == (3, 2)
    partial = KVCacheDataset(extended, connection=connection, on_missing="skip", min_hit_tokens=96)
    batch = collate(partial.__getitems__([4, 5, 0]))
    assert (batch.index.tolist(), batch.lengths.tolist()) == ([4, 1, 0], [96, 96, 64])
    assert torch.equal(batch.kv[0, :, :, :96], caches[1])
    for data in (strict, skipping, partial):
        data.close()


def test_salts_of_records_go_before_the_datasets(connection):
    tokens, plain, salted = fresh_tokens(32), random_kv(32), random_kv(32)
    with connection.connect() as ctx:
        ctx.store(plain, tokens, "a")
        ctx.store(salted, tokens, "b")
    data = KVCacheDataset([{"tokens": tokens}, {"tokens": tokens, "salt": "b"}], connection=connection, cache_salt="a")
    assert torch.equal(data[0]["kv"], plain)
    assert torch.equal(data[1]["kv"], salted)
    data.close()


def test_a_dataset_pickles_without_its_connection(filled):
    data = dataset(filled)
    first = data[0]["kv"]
    copy = pickle.loads(pickle.dumps(data))
    assert copy.context.stats()["handshakes"] == 0
    assert torch.equal(copy[0]["kv"], first)
    copy.close()
    data.close()


def test_plain_loaders_work_too(filled):
    data = dataset(filled)
    loader = DataLoader(data, batch_size=2, collate_fn=collate)
    assert [b.index.tolist() for b in loader] == [[0, 1], [2, 3]]
    single = DataLoader(data, batch_size=None)  # no batching, no __getitems__
    assert [int(s["index"]) for s in single] == [0, 1, 2, 3]
    data.close()


def test_worker_init_finds_datasets_inside_wrappers(filled):
    data = dataset(filled)
    nested = ConcatDataset([Subset(data, [0]), Subset(Subset(data, [1, 2]), [0])])
    assert _kv_datasets(nested) == [data, data]
    assert _kv_datasets([1, 2]) == []


def test_arguments_are_checked():
    with pytest.raises(InvalidRequest, match="needs url"):
        KVCacheDataset([[1]], "tcp://h:1")
    with pytest.raises(InvalidRequest, match="not both"):
        KVCacheDataset([[1]], "tcp://h:1", connection=Connection("tcp://h:1", "http://h", "m"))
    with pytest.raises(InvalidRequest, match="on_missing"):
        KVCacheDataset([[1]], "tcp://h:1", "http://h", "m", on_missing="ignore")  # type: ignore[arg-type]


def test_prefixes_of_every_kind(tmp_path):
    ragged = Prefixes.of([[1, 2], np.array([3]), torch.tensor([4, 5, 6]), {"tokens": [7], "salt": "s"}])
    assert [r.tokens.tolist() for r in ragged] == [[1, 2], [3], [4, 5, 6], [7]]
    assert [r.salt for r in ragged] == [None, None, None, "s"]
    assert ragged[-1].tokens.tolist() == [7]
    assert [r.tokens.tolist() for r in ragged[1:3]] == [[3], [4, 5, 6]]
    with pytest.raises(IndexError):
        ragged[4]
    path = tmp_path / "prefixes.jsonl"
    record = PrefixRecord(np.array([2**32 - 1]), np.array([9]), "salt", {"a": [1]})
    Prefixes([record], LAYOUT, "model").to_jsonl(path)
    back = Prefixes.from_jsonl(path)
    assert (back.layout, back.model_name) == (LAYOUT, "model")
    assert back[0].tokens.tolist() == [2**32 - 1]
    assert back[0].continuation.tolist() == [9]
    assert (back[0].salt, back[0].meta) == ("salt", {"a": [1]})


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "line 1"),
        (json.dumps({"token": [1]}), "needs 'tokens'"),
        (json.dumps({"tokens": [1], "label": 3}), "unknown fields.*label"),
        (json.dumps({"tokens": [-1]}), "0 .. 2"),
        (json.dumps({"tokens": [1], "salt": "a@b"}), "cache_salt"),
        (json.dumps({"kvdata": 2}), "version 2"),
    ],
)
def test_bad_prefix_files_name_the_fault(tmp_path, line, match):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InvalidRequest, match=match):
        Prefixes.from_jsonl(path)


def test_text_becomes_windows():
    class Letters:
        def encode(self, text, *, add_special_tokens=True):
            assert not add_special_tokens
            return [ord(c) for c in text]

    windows = Prefixes.from_text(["abcdefg", "hi", "jklmnop"], Letters(), 2, 1, [{"name": n} for n in "xyz"])
    assert ["".join(map(chr, r.tokens)) for r in windows] == ["ab", "de", "jk", "mn"]
    assert ["".join(map(chr, r.continuation)) for r in windows] == ["c", "f", "l", "o"]
    assert [r.meta for r in windows][2] == {"document": 2, "window": 0, "name": "z"}


def test_a_batch_moves_as_one():
    ones = torch.ones(1, 2, dtype=torch.int64)
    one = ones[0, :1]
    batch = KVBatch(torch.ones(1, 2, 1, 2, 4), ones, ones.bool(), one, one, one, ones, ones.bool(), [""], [{}])
    half = batch.to("cpu", torch.float16)
    assert half.kv.dtype == torch.float16
    assert half.tokens.dtype == torch.int64
    assert half.mask.dtype == torch.bool
    assert len(half) == 1
