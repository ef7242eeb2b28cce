"""KVCacheWriter under a real Trainer and a real server: nothing lost, and failures are heard."""

from __future__ import annotations

import json
import logging
import threading

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from kvdata import Connection, KVCacheDataset
from kvdata.datasets import Manifest
from kvdata.errors import InvalidRequest, MissingKV, StoreFailed
from kvdata.lightning import CacheWrite, KVCacheWriter
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*")


class Emits(L.LightningModule):
    """A module whose steps put out prepared writes."""

    def __init__(self, batches, fail_at=None, as_dict=False):
        super().__init__()
        self.batches, self.fail_at, self.as_dict = batches, fail_at, as_dict

    def predict_step(self, batch, index):
        if index == self.fail_at:
            raise RuntimeError("the model failed")
        return {"cache_writes": self.batches[index]} if self.as_dict else self.batches[index]

    test_step = predict_step


def write(tokens=64, policy="keydiff", **options) -> CacheWrite:
    source = fresh_tokens(2 * tokens)
    return CacheWrite(random_kv(tokens), source, policy, **options)


def trainer(writer) -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, callbacks=[writer], enable_progress_bar=False, barebones=False)


def predict(writer, module):
    loader = DataLoader(range(len(module.batches)))
    trainer(writer).predict(module, loader, return_predictions=False)


def readable(connection: Connection, written: CacheWrite) -> bool:
    with connection.connect() as ctx:
        found = ctx.retrieve(*written.address())
    return found is not None and torch.equal(found, written.kv)


def writer_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "kvdata-writer"]


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


def test_after_an_error_in_the_module_what_was_put_out_is_still_written(connection):
    batches = [[write()], [write()], []]
    writer = KVCacheWriter(connection)
    with pytest.raises(RuntimeError, match="the model failed"):
        predict(writer, Emits(batches, fail_at=2))
    assert writer.counts.stored == 2
    assert all(readable(connection, batch[0]) for batch in batches[:2])
    assert not writer_threads()


def test_a_failed_store_is_raised_with_its_reason(connection):
    bad = CacheWrite(random_kv(33), fresh_tokens(64), "keydiff")
    writer = KVCacheWriter(connection)
    good = write()
    with pytest.raises(StoreFailed, match="not whole chunks of 32"):
        predict(writer, Emits([[bad], [good], [], []]))
    assert writer.counts.failed == 1


def test_a_dead_server_fails_the_run_and_never_hides_the_first_error(caplog):
    nobody = Connection("tcp://127.0.0.1:1", "http://127.0.0.1:1", "m", 1.0, LAYOUT)
    writer = KVCacheWriter(nobody)
    with pytest.raises(StoreFailed, match="is the server running"):
        predict(writer, Emits([[write()]]))
    failing = KVCacheWriter(nobody)
    with pytest.raises(RuntimeError, match="the model failed"), caplog.at_level(logging.ERROR, "kvdata"):
        predict(failing, Emits([[write()], []], fail_at=1))
    assert "1 compressed caches were not stored" in caplog.text
    assert failing.counts.failed == 1
    assert not writer_threads()


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
