"""KVCacheDocuments: from a prefix file and plain values to loaders that share no document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

from kvdata import Connection, Prefixes
from kvdata.datasets import split_by_document
from kvdata.errors import InvalidRequest, MissingKV
from kvdata.lightning import KVCacheDocuments
from kvdata.lightning.split_file import SplitFile
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv
from tests.unit.test_datamodule import Module, Stop, Validating, trainer

SIZES = {"alpha": 3, "beta": 2, "gamma": 4, "delta": 1, "epsilon": 5, "zeta": 3}
COUNT = sum(SIZES.values())

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*",
    "ignore:.*exists and is not empty.*",
    "ignore:.*does not have many workers.*",
    "ignore:.*infer the batch indices.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*args parameter is intended.*",
)


def records() -> list[dict]:
    names = [name for name, size in SIZES.items() for _ in range(size)]
    return [{"tokens": fresh_tokens(32), "meta": {"document": name}} for name in names]


def parts(prefixes: Prefixes, **options) -> dict[str, set[str]]:
    splits = split_by_document(prefixes, **options)
    found = {name: {r.meta["document"] for r in getattr(splits, name)} for name in ("train", "validation", "test")}
    assert {name: sorted(names) for name, names in found.items()} == splits.documents
    return found


def test_splits_are_whole_documents_chosen_by_name_alone():
    prefixes = Prefixes.of(records())
    found = parts(prefixes, held_out=4, validation=3)
    assert sum(map(len, found.values())) == len(SIZES)
    assert set.union(*found.values()) == set(SIZES)
    for name, least in (("test", 4), ("validation", 3)):
        windows = sum(SIZES[document] for document in found[name])
        assert windows >= least
        assert any(windows - SIZES[document] < least for document in found[name])  # none more than needed
    assert parts(prefixes[::-1], held_out=4, validation=3) == found
    assert parts(prefixes, held_out=4, validation=0)["test"] == found["test"]
    assert any(parts(prefixes, held_out=4, validation=3, seed=seed) != found for seed in range(1, 9))
    split = split_by_document(prefixes, 4, 3)
    assert [r.tokens[0] for r in split.train] == sorted(r.tokens[0] for r in split.train)


def test_what_cannot_be_split_is_refused():
    prefixes = Prefixes.of(records())
    with pytest.raises(InvalidRequest, match=r"prefix 0 does not name its document.*'document', not 'book'"):
        split_by_document(prefixes, 4, key="book")
    with pytest.raises(InvalidRequest, match="no document is left for training: 6 documents have 18"):
        split_by_document(prefixes, 17, 1)
    with pytest.raises(InvalidRequest, match="count prefixes"):
        split_by_document(prefixes, -1)


@pytest.fixture
def file(connection, tmp_path) -> Path:
    """A prefix file, and its caches in the server."""
    prefixes = Prefixes(Prefixes.of(records()), LAYOUT, "unit/model")
    prefixes.to_jsonl(tmp_path / "prompts.jsonl")
    with connection.connect() as ctx:
        for record in prefixes:
            ctx.store(random_kv(32), record.tokens)
    return tmp_path / "prompts.jsonl"


def documents(file: Path, connection: Connection, **options) -> KVCacheDocuments:
    where = {"url": connection.url, "http_url": connection.http_url}
    return KVCacheDocuments(file, **{**where, "held_out": 4, "validation": 3, "batch_size": 2, "seed": 5, **options})


def test_every_stage_reads_its_documents(file, connection, tmp_path):
    data = documents(file, connection)
    module = Validating()
    run = trainer(tmp_path / "checkpoints", max_epochs=1, default_root_dir=tmp_path)
    run.fit(module, datamodule=data)
    written = json.loads((tmp_path / "prompts.splits.json").read_text())
    prefixes = Prefixes.from_jsonl(file)
    split = split_by_document(prefixes, 4, 3)
    assert written["documents"] == split.documents
    assert written["prefixes"] == prefixes.digest()
    assert written["chosen"] == {"split_by": "document", "held_out": 4, "validation": 3, "seed": 0}
    assert sorted(module.seen) == list(range(len(split.train)))
    assert module.validated[-len(split.validation) :] == list(range(len(split.validation)))
    seen = [meta["document"] for batch in data.predict_dataloader() for meta in batch.meta]
    assert seen == [r.meta["document"] for r in split.test]
    assert sum(len(batch) for batch in data.test_dataloader()) == len(split.test)
    data.teardown("predict")


def test_a_run_resumes_and_without_validation_it_only_trains(file, connection, tmp_path):
    options = {"validation": 0, "limit": 6}
    whole, crashed, resumed = Module(), Module(2), Module()
    quiet = {"max_epochs": 1, "default_root_dir": tmp_path}
    trainer(tmp_path / "whole", **quiet).fit(whole, datamodule=documents(file, connection, **options))
    with pytest.raises(Stop):
        trainer(tmp_path / "crash", **quiet).fit(crashed, datamodule=documents(file, connection, **options))
    last = tmp_path / "crash" / "step=2.ckpt"
    trainer(tmp_path / "crash", **quiet).fit(resumed, datamodule=documents(file, connection, **options), ckpt_path=last)
    assert sorted(whole.seen) == list(range(6))
    assert crashed.seen + resumed.seen == whole.seen


def test_further_prefixes_are_only_trained_on(file, connection, tmp_path):
    more = [{"tokens": fresh_tokens(32), "meta": {"document": "eta"}} for _ in range(2)]
    Prefixes.of(more).to_jsonl(tmp_path / "more.jsonl")
    plain, data = documents(file, connection), documents(file, connection, more_training=tmp_path / "more.jsonl")
    for name in ("val", "test", "predict"):
        assert data.dataset(name).prefixes.digest() == plain.dataset(name).prefixes.digest()
    train = [r.tokens.tolist() for r in data.dataset("train").prefixes]
    assert train == [r.tokens.tolist() for r in plain.dataset("train").prefixes] + [r["tokens"] for r in more]
    assert data.dataset("train").connection.layout == LAYOUT
    data._splits.write(tmp_path / "s.json")
    documents(file, connection, split_file=tmp_path / "s.json").setup("fit")  # the splits are the same
    both = plain.dataset("test").prefixes[0].meta["document"]
    Prefixes.of([{**more[0], "meta": {"document": both}}]).to_jsonl(tmp_path / "again.jsonl")
    with pytest.raises(InvalidRequest, match=rf"again.jsonl has prefixes of documents that are held out: {both}"):
        documents(file, connection, more_training=tmp_path / "again.jsonl")


def test_other_prefixes_or_other_numbers_are_refused_once_splits_are_written(file, connection, tmp_path):
    where = tmp_path / "splits" / "s.json"
    with pytest.raises(InvalidRequest, match="prepare_data writes them"):
        documents(file, connection, split_file=where).setup("fit")
    documents(file, connection, split_file=where).prepare_data()
    same = documents(file, connection, split_file=where, limit=2, batch_size=3)
    same.prepare_data()
    same.setup("fit")
    other = documents(file, connection, split_file=where, held_out=5)
    with pytest.raises(InvalidRequest, match=r"written for other .*held_out"):
        other.prepare_data()
    with pytest.raises(InvalidRequest, match=r"written for other .*held_out"):
        other.setup("test")
    Prefixes.from_jsonl(file)[:-1].to_jsonl(file)
    with pytest.raises(InvalidRequest, match="written for other prefixes"):
        documents(file, connection, split_file=where).setup("fit")
    where.write_text("{}")
    with pytest.raises(InvalidRequest, match="holds no splits"):
        documents(file, connection, split_file=where).setup("fit")


def test_missing_caches_are_named_before_the_run(file, connection, tmp_path, caplog):
    training = split_by_document(Prefixes.from_jsonl(file), 4, 3).train
    with connection.connect() as ctx:
        for record in training[:2]:
            ctx.delete(record.tokens)
    quiet = {"max_epochs": 1, "default_root_dir": tmp_path}
    with pytest.raises(MissingKV, match=r"2 of \d+ prefixes of .*kvdata ingest .*prompts.jsonl"):
        trainer(tmp_path / "a", **quiet).fit(Validating(), datamodule=documents(file, connection))
    assert not (tmp_path / "prompts.splits.json").exists()
    run = trainer(tmp_path / "b", **quiet)
    assert run.predict(Module(), datamodule=documents(file, connection))  # whose caches are all there
    module = Validating()
    trainer(tmp_path / "c", **quiet).fit(module, datamodule=documents(file, connection, on_missing="skip"))
    assert "are not (fully) cached, and are skipped" in caplog.text
    assert not {0, 1} & set(module.seen)
    with pytest.raises(InvalidRequest, match="kvdata ingest writes one"):
        documents(tmp_path / "nowhere.jsonl", connection)


def test_lightnings_command_line_makes_it_of_a_yaml_file(file, connection, tmp_path, monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of Lightning's own use of it
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
data:
  prefixes: {file}
  url: {connection.url}
  http_url: {connection.http_url}
  held_out: 4
  validation: 3
  loader_options: {{threads: 1}}
  dataset_options: {{kinds: [k]}}
trainer:
  max_epochs: 1
  accelerator: cpu
  devices: 1
  logger: false
  enable_progress_bar: false
  enable_checkpointing: false
  default_root_dir: {tmp_path}
"""
    )
    cli = LightningCLI(
        Validating,
        KVCacheDocuments,
        args=["fit", "--config", str(config), "--data.limit=4"],
        save_config_callback=None,
        seed_everything_default=False,
    )
    assert sorted(cli.model.seen) == [0, 1, 2, 3]
    assert (tmp_path / "prompts.splits.json").exists()


def test_what_was_held_out_is_found_again(file, connection, tmp_path):
    data = documents(file, connection, split_file=tmp_path / "splits.json")
    data.prepare_data()
    written, prefixes = SplitFile.read(tmp_path / "splits.json"), Prefixes.from_jsonl(file)
    held_out = written.held_out(prefixes)
    assert len(held_out) >= 4
    assert {r.meta["document"] for r in held_out} == set(written.documents["test"])
    with pytest.raises(InvalidRequest, match="another prefix file"):
        written.held_out(prefixes[:5])
