"""The recipe's parts: targets from the cache alone, kept after the first epoch; a loss that falls."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from kvdata import KVCacheDataset, collate
from kvdata.edits.functions import weights_revision
from kvdata.edits.policies import KeyDiff, Oracle, Random
from kvdata.edits.rope import Rope
from kvdata.engines.huggingface import HuggingFaceEngine, attention_target
from tests.unit.conftest import fresh_tokens
from tests.unit.tiny_model import tiny_engine
from training.text import documentation_windows, split_by_document
from training.token_dropping import CompressCaches, Teacher, TokenDropping

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*no `val_dataloader`.*",
    "ignore:.*does not have many workers.*",
    "ignore:.*LeafSpec.*",
    "ignore:.*smaller than the logging interval.*",
)


@pytest.fixture(scope="module")
def engine() -> HuggingFaceEngine:
    return tiny_engine(initializer_range=0.02)


@pytest.fixture
def dataset(engine, connection):
    """Eight prefixes of the tiny model in the server."""
    generator = torch.Generator().manual_seed(1)
    salt = f"training-{fresh_tokens(1)[0]}"
    records = []
    with connection.connect() as ctx:
        for _ in range(8):
            ids = torch.randint(97, (112,), generator=generator).tolist()
            engine.store_prefix(ctx, ids[:96], salt)
            records.append({"tokens": ids[:96], "continuation": ids[96:]})
    data = KVCacheDataset(records, connection=connection, cache_salt=salt)
    yield data
    data.close()


def test_targets_are_the_models_attention_and_are_computed_once(engine, dataset):
    batch = collate(dataset.__getitems__([2, 5]))
    teacher = Teacher(engine)
    found = teacher(batch)
    assert found.shape == (2, 3, 2, 96)
    for row in range(2):
        attention = engine.attention(batch.kv[row], batch.continuation[row])
        assert torch.allclose(found[row], attention_target(attention, 2), atol=1e-3)
    batch.kv.zero_()  # were it computed again, it would differ
    assert torch.equal(teacher(batch), found)


def test_training_lowers_the_loss_and_changes_the_revision(engine, dataset):
    torch.manual_seed(0)
    module = TokenDropping(engine, width=16, warmup_steps=2, sampled_tokens=40)
    model = module.scorer
    before = weights_revision(model)
    losses: list[float] = []
    module.log = lambda name, value, **_: losses.append(value.item())
    loader = DataLoader(dataset, batch_size=2, collate_fn=collate)
    trainer = L.Trainer(
        max_epochs=20, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, loader)
    assert len(losses) == 80
    assert sum(losses[-8:]) < sum(losses[:8])
    assert weights_revision(model) != before
    assert weights_revision(model) == weights_revision(model)


def test_the_teacher_is_not_part_of_the_checkpoint(engine):
    module = TokenDropping(engine)
    assert all(name.startswith("scorer.") for name in module.state_dict())


def test_every_policy_compresses_every_cache_to_every_budget(engine, dataset):
    policies = [(Random(), "r1"), (KeyDiff(), "r2"), (Oracle(), "r1")]
    module = CompressCaches(policies, [64, 48], Rope.from_config(engine.config), 2, Teacher(engine))
    writes = module.predict_step(collate(dataset.__getitems__([1, 3])), 0)
    assert [(w.policy, w.revision, w.kv.shape[2], w.meta["index"]) for w in writes] == [
        (policy.name, revision, keep, index) for index in (1, 3) for policy, revision in policies for keep in (64, 48)
    ]
    assert len({w.address()[1] for w in writes}) == 12  # no two share an address
    assert writes[0].kv.dtype == dataset[1]["kv"].dtype


def test_windows_are_split_by_document():
    class Words:
        def encode(self, text, *, add_special_tokens=True):
            return [len(word) for word in text.split()]

    windows = documentation_windows(Words(), 100, 20)
    training, held_out = split_by_document(windows, 12)
    names = [{r.meta["name"] for r in part} for part in (training, held_out)]
    assert not names[0] & names[1]
    assert len(held_out) >= 12
    assert len(training) + len(held_out) == len(windows)
    again = split_by_document(windows, 12)[1]
    assert [r.meta for r in again] == [r.meta for r in held_out]
