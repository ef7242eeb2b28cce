"""The autoencoder's recipe on a tiny model's caches in a server: start, training, checkpoint, what it writes back."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from kvdata import KVCacheDataset, collate
from kvdata.edits import functions
from kvdata.engines.huggingface import HuggingFaceEngine
from kvdata.lightning import CacheWrite, KVCacheDataModule, KVCacheWriter
from tests.unit.conftest import fresh_tokens
from tests.unit.tiny_model import tiny_engine
from training.autoencoder import Autoencoder

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*LeafSpec.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*callbacks used to create the checkpoint.*",
)
TOKENS = 96


@pytest.fixture(scope="module")
def engine() -> HuggingFaceEngine:
    return tiny_engine()


@pytest.fixture
def dataset(engine, connection):
    """Six prefixes of the tiny model in the server."""
    generator = torch.Generator().manual_seed(1)
    salt = f"autoencoder-{fresh_tokens(1)[0]}"
    records = []
    with connection.connect() as ctx:
        for number in range(6):
            ids = torch.randint(97, (TOKENS + 16,), generator=generator).tolist()
            engine.store_prefix(ctx, ids[:TOKENS], salt)
            records.append({"tokens": ids[:TOKENS], "continuation": ids[TOKENS:], "meta": {"name": f"d{number}"}})
    data = KVCacheDataset(records, connection=connection, cache_salt=salt)
    yield data
    data.close()


def recipe(engine: HuggingFaceEngine, **options) -> Autoencoder:
    torch.manual_seed(0)
    options = {"ratio": 0.4, "context_tokens": TOKENS, "sampled_queries": 16, "warmup_steps": 2, **options}
    return Autoencoder(engine, **options)


def trainer(folder, **options) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        **options,
    )


@pytest.mark.parametrize("precisions", [(16,), (8,), (4,), (4, 8, 16)])
def test_the_start_keeps_to_its_bytes(engine, dataset, precisions):
    module = recipe(engine, precisions=precisions, window=2)
    module.calibrate(dataset)
    batch = collate(dataset.__getitems__(range(6)))
    assert set(module.autoencoder.bits.unique().tolist()) <= {0, *precisions}
    kept = module.autoencoder.encode(batch.kv)
    assert 0.3 < kept.nbytes / (batch.kv.numel() * 2) <= 0.4
    assert kept.nbytes == 6 * module.autoencoder.nbytes(TOKENS)


def test_the_error_is_that_of_the_models_attention(engine, dataset):
    """With one cache zeroed in its values everywhere, nothing of the output is left: an error of one."""
    module, batch = recipe(engine), collate(dataset.__getitems__([0, 1]))
    every = torch.arange(16)
    module.autoencoder.forward = lambda kv: kv
    assert module._error(batch, "val", every) < 1e-9
    module.autoencoder.forward = lambda kv: torch.stack((kv[:, 0], torch.zeros_like(kv[:, 1])), dim=1)
    assert module._error(batch, "val", every) == pytest.approx(1, abs=1e-5)


def test_training_lowers_the_error_and_its_checkpoint_is_an_edit(engine, dataset, tmp_path):
    module, data = recipe(engine, ratio=0.25, learning_rate=5e-3), KVCacheDataModule(dataset, dataset, batch_size=2)
    errors: list[float] = []
    logged = module.log_dict

    def log_dict(found, **options):
        errors.append(float(found["val_loss"]))
        logged(found, **options)

    module.log_dict = log_dict
    run = trainer(tmp_path, max_epochs=15, num_sanity_val_steps=0)
    run.fit(module, data)
    assert len(errors) == 45
    assert sum(errors[-3:]) < 0.85 * sum(errors[:3])
    path = run.checkpoint_callback.best_model_path
    assert not any("engine" in name for name in torch.load(path)["state_dict"])
    edit, sample = functions.autoencoder(path, engine.config), dataset[3]
    rebuilt, ids, salt = edit.derive(sample["kv"], sample["tokens"].tolist(), 32, sample["salt"])
    (write,) = predicted(module, [sample])
    assert (ids, salt) == write.address()
    assert torch.equal(rebuilt, write.kv)


def test_a_checkpoint_goes_on_with_the_same_code(engine, dataset, tmp_path):
    data, first = KVCacheDataModule(dataset, dataset, batch_size=3), recipe(engine)
    run = trainer(tmp_path, max_epochs=1)
    run.fit(first, data)
    path = run.checkpoint_callback.best_model_path
    again = recipe(engine, learning_rate=0.0)
    trainer(tmp_path, max_epochs=2, enable_checkpointing=False).fit(again, data, ckpt_path=path)
    for name, tensor in first.autoencoder.state_dict().items():
        torch.testing.assert_close(again.autoencoder.state_dict()[name], tensor, atol=1e-2, rtol=0)
    assert torch.equal(again.autoencoder.bits, first.autoencoder.bits)


def test_reconstructions_go_back_into_the_server(engine, dataset, connection, tmp_path):
    module = recipe(engine)
    module.calibrate(dataset)
    writer = KVCacheWriter(connection, tmp_path / "manifest.jsonl", stages=["predict"])
    run = trainer(tmp_path, callbacks=[writer], enable_checkpointing=False)
    run.predict(module, KVCacheDataModule(predict=dataset, batch_size=4), return_predictions=False)
    assert (writer.counts.stored, writer.counts.failed) == (6, 0)
    (write,) = predicted(module, [dataset[2]])
    assert write.meta == {"name": "d2", "index": 2}
    tokens, salt = write.address()
    assert tokens == dataset[2]["tokens"].tolist()
    assert salt.startswith(f"{write.prefix}~autoencoder.{TOKENS}-")
    assert write.prefix.startswith("autoencoder-")  # the salt of the full cache
    with connection.connect() as ctx:
        assert torch.equal(ctx.retrieve(tokens, salt), write.kv)


def test_the_error_and_the_bytes_are_logged(engine, dataset, tmp_path):
    module = recipe(engine)
    module.calibrate(dataset)
    run = trainer(tmp_path, enable_checkpointing=False)
    (found,) = run.test(module, KVCacheDataModule(test=dataset, batch_size=4), verbose=False)
    assert found["test_bytes_ratio"] == pytest.approx(module.autoencoder.ratio(TOKENS))
    assert 0 < found["test_loss"] < 1


def predicted(module: Autoencoder, samples: list) -> list[CacheWrite]:
    module.eval().on_predict_start()
    with torch.no_grad():
        return module.predict_step(collate(samples), 0)
