"""KVCacheWriter under a real Trainer and a real server: nothing lost, and failures are heard."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from kvdata import KVCacheDataset
from kvdata.datasets import Manifest
from kvdata.errors import InvalidRequest, MissingKV, StoreConflict, StoreFailed
from kvdata.lightning import CacheWrite, KVCacheWriter
from kvdata.lightning.pending import Pending
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv
from tests.unit.writes import QUIET, Emits, Trains, predict, readable, trainer, write, writer_threads

pytestmark = QUIET


def test_every_output_is_stored_and_listed(connection, tmp_path):
    batches = [[write(meta={"n": 0}), write(32)], [write(revision="r2", prefix="team")]]
    writer = KVCacheWriter(connection, tmp_path / "out" / "manifest.jsonl")
    predict(writer, Emits(batches))
    assert all(readable(connection, w) for batch in batches for w in batch)
    assert (writer.counts.stored, writer.counts.deduplicated, writer.counts.failed) == (3, 0, 0)
    assert writer.counts.chunks == 5
    assert writer.counts.bytes == 160 * LAYOUT.token_bytes
    lines = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [w.address()[0] for batch in batches for w in batch]
    assert lines[0]["meta"] == {"n": 0}
    assert lines[2]["salt"].startswith("team~keydiff.64-r2-")
    assert lines[1]["bytes"] == 32 * LAYOUT.token_bytes
    manifest = Manifest.load(tmp_path / "out" / "manifest.jsonl")
    assert len(manifest) == 3
    assert [len(e.tokens) for e in manifest.select("keydiff", 64)] == [64, 64]
    prompt = [*batches[1][0].source_tokens, 7, 8]
    ids, salt = manifest.request_for(prompt)
    assert (ids, salt) == ([*batches[1][0].source_tokens[:64], 7, 8], batches[1][0].address()[1])
    data = KVCacheDataset(manifest.prefixes(), connection=connection)
    assert torch.equal(data[2]["kv"], batches[1][0].kv)
    data.close()
    with pytest.raises(MissingKV, match="none of the 3 caches"):
        manifest.request_for(fresh_tokens(200))
    assert not writer_threads()


def test_writing_the_same_again_is_deduplicated_but_other_content_is_refused(connection):
    first = write()
    predict(KVCacheWriter(connection), Emits([[first]]))
    again = KVCacheWriter(connection)
    predict(again, Emits([[first]]))
    assert (again.counts.stored, again.counts.deduplicated) == (0, 1)
    other = KVCacheWriter(connection)
    with pytest.raises(StoreFailed, match="new revision="):
        predict(other, Emits([[CacheWrite(random_kv(64), first.source_tokens, first.policy)]]))
    assert other.counts.failed == 1
    assert readable(connection, first)


def test_outputs_of_other_stages_are_left_alone(connection):
    writes = [[write()]]
    writer = KVCacheWriter(connection, stages=["test"])
    predict(writer, Emits(writes))
    assert writer.counts.stored == 0
    trainer(writer).test(Emits(writes, as_dict=True), DataLoader(range(1)), verbose=False)
    assert writer.counts.stored == 1
    with pytest.raises(InvalidRequest, match="unknown stages"):
        KVCacheWriter(connection, stages=["fit"])


def test_a_manifest_with_two_caches_of_one_prompt_asks_which(connection, tmp_path):
    source = fresh_tokens(128)
    writes = [[CacheWrite(random_kv(kept), source, policy) for policy in ("keydiff", "learned") for kept in (64, 32)]]
    predict(KVCacheWriter(connection, tmp_path / "m.jsonl"), Emits(writes))
    predict(KVCacheWriter(connection, tmp_path / "m.jsonl"), Emits(writes))  # appended, the same addresses
    manifest = Manifest.load(tmp_path / "m.jsonl")
    assert len(manifest) == 4
    with pytest.raises(InvalidRequest, match=r"keydiff \(64 tokens\), keydiff \(32 tokens\).*select"):
        manifest.request_for(source)
    ids, salt = manifest.select("learned", 32).request_for(source)
    assert ids == source[:32]
    assert salt.startswith("~learned.32-r1-")
    (tmp_path / "m.jsonl").write_text('{"tokens": [1]}')
    with pytest.raises(InvalidRequest, match="line 1, is not"):
        Manifest.load(tmp_path / "m.jsonl")


def test_a_cache_that_comes_twice_is_written_and_listed_once(connection, tmp_path):
    one, other = write(), write()
    writer = KVCacheWriter(connection, tmp_path / "m.jsonl")
    predict(writer, Emits([[one, one], [other], [one]]))
    assert (writer.counts.stored, writer.counts.deduplicated, writer.counts.chunks) == (2, 2, 4)
    assert [e.salt for e in Manifest.load(tmp_path / "m.jsonl")] == [one.address()[1], other.address()[1]]
    with pytest.raises(StoreConflict, match="new revision="):
        predict(KVCacheWriter(connection), Emits([[one, replace(one, kv=random_kv(64))]]))
    assert readable(connection, one)


def test_the_queue_holds_so_many_bytes_or_one_larger_item():
    pending = Pending[str](10)
    assert pending.put("larger", 25, 0)
    assert not pending.put("small", 1, 0.05)
    assert pending.put("nothing", 0, 0)
    assert pending.drop() == ["larger", "nothing"]
    assert pending.put("six", 6, 0)
    assert not pending.put("five", 5, 0.05)
    assert pending.put("four", 4, 0)
    assert not pending.wait_done(0)
    seen: list[str] = []
    thread = threading.Thread(target=pending.consume, args=[seen.append])
    thread.start()
    assert pending.put("ten", 10, 30)  # waits until both are done
    assert pending.wait_done(30)
    pending.close()
    thread.join(30)
    assert seen == ["six", "four", "ten"]


def test_caches_larger_than_the_queue_pass_one_by_one(connection):
    batches = [[write(), write()], [write()]]
    writer = KVCacheWriter(connection, max_pending_bytes=1)
    predict(writer, Emits(batches))
    assert writer.counts.stored == 3
    assert all(readable(connection, w) for batch in batches for w in batch)


def test_of_every_so_many_caches_one_is_read_back(connection):
    for every, expected in ((0, 0), (1, 5), (2, 3), (16, 1)):
        writer = KVCacheWriter(connection, verify_every=every)
        predict(writer, Emits([[write(), write(32)], [write(), write(32), write()]]))
        assert writer.counts.stored == 5
        assert writer.counts.verified == expected
        assert writer.counts.chunks_read == {0: 0, 1: 8, 2: 6, 16: 2}[every]


def test_without_a_trainer_it_is_submitted_and_flushed(connection, tmp_path):
    writer = KVCacheWriter(connection, tmp_path / "m.jsonl")
    first, second = write(), write()
    for one in (first, second):
        writer.submit(one)
        writer.flush()
    assert [len(e.tokens) for e in Manifest.load(tmp_path / "m.jsonl")] == [64, 64]
    assert [path.name for path in tmp_path.iterdir()] == ["m.jsonl"]
    writer.flush()
    assert not writer_threads()


def fit(writer, module, **options):
    train, validation = DataLoader(range(len(module.batches))), DataLoader(range(len(module.validation)))
    trainer(writer, max_epochs=1, **options).fit(module, train, validation)


def test_fast_dev_run_and_the_sanity_check_write_nothing(connection, embedded, tmp_path):
    module = Trains([[write()]], [[write()]])
    writer = KVCacheWriter(connection, tmp_path / "m.jsonl", ["train", "validation", "predict"])
    fit(writer, module, fast_dev_run=True)
    trainer(writer, fast_dev_run=True).predict(module, DataLoader(range(1)))
    assert not list(tmp_path.iterdir())
    failing = Trains([], [[write()], [write()]])  # two validation batches in the sanity check, and nothing after it
    trainer(writer, max_epochs=0, num_sanity_val_steps=2).fit(failing, DataLoader(range(1)), DataLoader(range(2)))
    assert writer.counts.stored == 0
    assert not any(readable(connection, w) for w in (module.batches[0][0], module.validation[0][0]))
    assert not any(readable(connection, batch[0]) for batch in failing.validation)
    assert not list(tmp_path.iterdir())


def test_a_fit_writes_what_its_stages_put_out(connection, tmp_path):
    module = Trains([[write()], [write()]], [[write(32)]])
    writer = KVCacheWriter(connection, tmp_path / "m.jsonl", ["train", "validation"])
    fit(writer, module)
    assert len(Manifest.load(tmp_path / "m.jsonl")) == 3
    assert writer.counts.stored == 3
    only = KVCacheWriter(connection, tmp_path / "validation.jsonl", ["validation"])
    trainer(only).validate(module, DataLoader(range(1)), verbose=False)
    assert [len(e.tokens) for e in Manifest.load(tmp_path / "validation.jsonl")] == [32]


def test_no_checkpoint_is_written_unless_all_before_it_is_stored(connection, tmp_path):
    bad = CacheWrite(random_kv(33), fresh_tokens(64), "keydiff")
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    writer = KVCacheWriter(connection, tmp_path / "m.jsonl", ["train"])
    with pytest.raises(StoreFailed, match="not whole chunks"):
        fit(writer, Trains([[write()], [write()], [bad], [write()]], [[]]), callbacks=[checkpoint])
    assert {path.name for path in (tmp_path / "ckpt").iterdir()} == {"step=1.ckpt", "step=2.ckpt"}
    assert not (tmp_path / "m.jsonl").exists()
    assert len((tmp_path / "m.jsonl.rank0.part").read_text().splitlines()) == 2


@pytest.mark.parametrize("options", [{"max_pending_bytes": 0}, {"drain_seconds": 0}, {"verify_every": -1}])
def test_limits_that_make_no_sense_are_refused(connection, options):
    with pytest.raises(InvalidRequest, match="must be positive"):
        KVCacheWriter(connection, **options)
