"""The cartridge recipe on a tiny random Llama."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from kvdata import KVCacheDataset, Prefixes, collate
from kvdata.edits import functions
from kvdata.edits.address import source_digest
from kvdata.edits.policies import Compaction, Source, apply_policy
from kvdata.edits.rope import Rope
from kvdata.engines.huggingface import HuggingFaceEngine
from kvdata.errors import InvalidRequest, OtherSource
from kvdata.lightning import KVCacheDocument, KVCacheWriter
from kvdata.models.cartridge import Cartridge
from tests.unit.conftest import LAYOUT, fresh_tokens
from training.cartridge import CartridgeDistillation, initial_slots

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*LeafSpec.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*but have no `val_dataloader`.*",
)

SLOTS, DOCUMENT, VOCAB = 32, 128, 97


@pytest.fixture(scope="module")
def engine() -> HuggingFaceEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYOUT.num_layers,
        num_attention_heads=4,
        num_key_value_heads=LAYOUT.num_kv_heads,
        head_dim=LAYOUT.head_dim,
        initializer_range=0.3,  # peaky attention, so that what a cache holds matters
    )
    return HuggingFaceEngine(LlamaForCausalLM(config), model_name="unit/model")


@pytest.fixture
def dataset(engine, connection):
    """One document of the tiny model in the server."""
    salt = f"cartridge-{fresh_tokens(1)[0]}"
    ids = torch.randint(VOCAB, (DOCUMENT + 16,), generator=torch.Generator().manual_seed(1)).tolist()
    with connection.connect() as ctx:
        engine.store_prefix(ctx, ids[:DOCUMENT], salt)
    record = {"tokens": ids[:DOCUMENT], "continuation": ids[DOCUMENT:], "meta": {"name": "document"}}
    data = KVCacheDataset([record], connection=connection, cache_salt=salt)
    yield data
    data.close()


def recipe(engine: HuggingFaceEngine, **options) -> CartridgeDistillation:
    sizes = {"slots": SLOTS, "continuations": 12, "openings": 0, "held_out": 4, "text_tokens": 24, "references": 4}
    return CartridgeDistillation(engine, **{**sizes, "top_k": VOCAB, "texts_per_step": 4, **options})


def trainer(**options) -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **options)


def loader(dataset) -> DataLoader:
    return DataLoader(dataset, batch_size=1, collate_fn=collate)


def fresh_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_initial_slots_are_a_compaction_for_the_continuations_own_queries(engine, dataset):
    batch = collate([dataset[0]])
    module = recipe(engine)
    training, held_out = module._prepared(batch)
    assert (len(training), len(held_out)) == (8, 4)
    want = initial_slots(engine, batch.kv[0], training.ids[:4], SLOTS, module.ridge)
    assert torch.equal(module.cartridge(), want.float())
    # One text of as many tokens as the document has is what `Compaction` takes itself.
    kv, rope = batch.kv[0], Rope.from_config(engine.config)
    text = torch.tensor([fresh_ids(DOCUMENT, seed=5)])
    own = Compaction(rope, references=DOCUMENT, future=DOCUMENT, ridge=0.01)
    same, _ = apply_policy(own, kv, SLOTS, rope, 2, Source(queries=engine.queries(text, kv[None])[0]), window=8)
    torch.testing.assert_close(initial_slots(engine, kv, text, SLOTS, 0.01), same)


def test_training_lowers_the_divergence_on_texts_it_has_not_seen(engine, dataset):
    module = recipe(engine, learning_rate=3e-2)
    seen: list[float] = []
    module.log = lambda name, value, **_: seen.append(float(value)) if name == "val_kl" else None
    trainer(max_epochs=40, check_val_every_n_epoch=40).fit(module, loader(dataset), loader(dataset))
    first, last = seen[0], seen[-1]
    assert last < 0.9 * first
    start = module.cartridge.start
    assert torch.equal(module.cartridge()[:, :, :4], start[:, :, :4])  # the sinks
    assert not torch.equal(module.cartridge()[0], start[0])
    assert not torch.equal(module.cartridge()[1], start[1])
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())


def test_only_values_are_trained_when_keys_are_not(engine, dataset):
    module = recipe(engine, train_keys=False)
    trainer(max_epochs=2).fit(module, loader(dataset))
    assert torch.equal(module.cartridge()[0], module.cartridge.start[0])
    assert not torch.equal(module.cartridge()[1], module.cartridge.start[1])


def test_each_text_is_used_once_before_any_comes_again(engine, dataset):
    module = recipe(engine)
    used: list[int] = []
    chosen = module._chosen
    module._chosen = lambda count: (used.extend(chosen(count).tolist()), chosen(count))[1]
    trainer(max_epochs=4).fit(module, loader(dataset))
    assert sorted(used[:8]) == sorted(used[8:]) == list(range(8))


def test_a_checkpoint_goes_on_with_its_own_document_alone(engine, dataset, tmp_path):
    module = recipe(engine)
    first = trainer(max_epochs=2)
    first.fit(module, loader(dataset))
    first.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(Cartridge.load(tmp_path / "a.ckpt")(), module.cartridge())
    again = recipe(engine)
    trainer(max_epochs=2).fit(again, loader(dataset), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert torch.equal(again.cartridge(), module.cartridge())
    batch = collate([dataset[0]])
    batch.tokens[0, 5] += 1
    with pytest.raises(OtherSource):
        again.training_step(batch, 0)


def test_several_documents_in_a_batch_are_refused(engine, dataset):
    with pytest.raises(InvalidRequest, match="one document"):
        recipe(engine).validation_step(collate([dataset[0], dataset[0]]), 0)


def test_what_is_predicted_is_stored_under_its_own_address_bit_for_bit(engine, dataset, connection, tmp_path):
    module = recipe(engine)
    trainer(max_epochs=2).fit(module, loader(dataset))
    writer = KVCacheWriter(connection, tmp_path / "manifest.jsonl")
    trainer(callbacks=[writer]).predict(module, loader(dataset), return_predictions=False)
    (write,) = module.predict_step(collate([dataset[0]]), 0)
    tokens, salt = write.address()
    assert tokens == dataset[0]["tokens"].tolist()[:SLOTS]
    module.cartridge.save(tmp_path / "a.pt")
    edit = functions.cartridge(tmp_path / "a.pt", engine.config)
    edited, ids, same_salt = edit.derive(dataset[0]["kv"], dataset[0]["tokens"], 32, dataset[0]["salt"])
    assert (ids, same_salt) == (tokens, salt)  # writer and edit agree on the address
    assert torch.equal(edited, write.kv)
    with connection.connect() as ctx:
        assert torch.equal(ctx.retrieve(tokens, salt), module.cartridge.slots_as(write.kv.dtype))


def test_the_true_continuation_is_scored_from_both_caches(engine, dataset):
    module = recipe(engine)
    module._prepared(collate([dataset[0]]))
    (found,) = trainer().test(module, loader(dataset), verbose=False)
    kv, ids = dataset[0]["kv"], dataset[0]["continuation"]
    want = torch.nn.functional.cross_entropy(engine.continue_from(kv, ids)[:-1], ids[1:]).item()
    assert found["test_nll_full"] == pytest.approx(want, rel=1e-4)
    assert found["test_nll"] != pytest.approx(want, rel=1e-4)


def test_the_data_module_reads_one_document_in_every_stage(engine, dataset, connection, tmp_path):
    Prefixes.of([{"tokens": fresh_tokens(DOCUMENT)}, *dataset.prefixes]).to_jsonl(tmp_path / "documents.jsonl")
    where = {"url": connection.url, "http_url": connection.http_url, "model_name": connection.model_name}
    data = KVCacheDocument(tmp_path / "documents.jsonl", index=1, cache_salt=dataset.cache_salt, **where)
    module = recipe(engine)
    run = trainer(max_epochs=3, num_sanity_val_steps=1)
    run.fit(module, data)
    assert run.global_step == 3
    assert module.cartridge.source == source_digest(dataset[0]["tokens"].tolist())
    (found,) = run.test(module, data, verbose=False)
    assert set(found) == {"test_nll", "test_nll_full"}
    (writes,) = run.predict(module, data)
    assert [write.policy for write in writes] == ["cartridge"]


def test_a_document_that_is_not_in_the_file_is_refused(tmp_path):
    Prefixes.of([{"tokens": [1, 2]}]).to_jsonl(tmp_path / "documents.jsonl")
    where = {"url": "tcp://localhost:1", "http_url": "http://localhost:1", "model_name": "unit/model"}
    with pytest.raises(InvalidRequest, match="no prefix 1"):
        KVCacheDocument(tmp_path / "documents.jsonl", index=1, **where)
    with pytest.raises(InvalidRequest, match="kvdata ingest"):
        KVCacheDocument(tmp_path / "none.jsonl", **where)
