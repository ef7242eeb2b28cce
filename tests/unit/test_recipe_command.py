"""``python -m training`` as a user runs it: the shipped configurations, on a tiny model's caches in a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvdata.datasets import Manifest, Prefixes
from kvdata.edits.functions import autoencoder, cartridge, learned
from kvdata.errors import InvalidRequest
from kvdata.models.token_scorer import TokenScorer
from tests.unit.recipes import AUTOENCODER, CARTRIDGE, SCORER, arguments_for, of_one_document
from tests.unit.tiny_model import tiny_engine
from training.__main__ import main

# What Lightning, jsonargparse and tensorboard warn of in each other is not what is tested here.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture
def arguments(connection, tmp_path, monkeypatch) -> list[str]:
    """Options of the recipes, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    return arguments_for(connection, tmp_path)


def test_a_scorer_is_fitted_tested_and_its_caches_are_written_back(arguments, connection, tmp_path):
    main(["fit", *SCORER, *arguments])
    checkpoint = Path("runs/token-scorer/checkpoints/best.ckpt")
    losses = Path("runs/token-scorer/csv/metrics.csv").read_text()
    assert {"val_r2_layer02", "val_overlap_64", "train_loss"} <= set(losses.splitlines()[0].split(","))
    assert list(Path("runs/token-scorer/tensorboard").glob("events.*"))
    main(["test", *SCORER, *arguments, "--ckpt_path", str(checkpoint)])
    main(["predict", *SCORER, *arguments, "--ckpt_path", str(checkpoint), "--manifest", "manifest.jsonl"])
    assert Path("runs/token-scorer/csv/metrics.csv").read_text() == losses  # of the fit
    written = Manifest.load("manifest.jsonl")
    held_out = Prefixes.from_jsonl("windows.jsonl")
    assert len(written) == 3
    edit = learned(checkpoint, tiny_engine().config, keep=0.5)
    assert edit.revision == written[0].revision
    with connection.connect() as ctx:
        for entry in written:
            (source,) = [r for r in held_out if r.tokens[:64].tolist() == entry.tokens]
            kv = ctx.retrieve(source.tokens, arguments[4].split("=")[1])
            wanted, _ = edit(kv, source.tokens.tolist())
            assert torch.equal(ctx.retrieve(entry.tokens, entry.salt), wanted)


def test_fast_dev_run_leaves_nothing_behind(arguments):
    main(["fit", *SCORER, *arguments, "--trainer.fast_dev_run=true"])
    assert not Path("runs/token-scorer/checkpoints").exists()
    main(["predict", *SCORER, *arguments, "--trainer.fast_dev_run=true", "--manifest", "manifest.jsonl"])
    assert not Path("manifest.jsonl").exists()


def test_another_recipes_checkpoint_is_no_scorer(tmp_path):
    torch.save({"state_dict": {}, "epoch": 1}, tmp_path / "other.ckpt")
    with pytest.raises(InvalidRequest, match="not a token scorer"):
        TokenScorer.load(tmp_path / "other.ckpt")


def test_a_servers_error_is_one_line(arguments, capsys):
    with pytest.raises(SystemExit, match="1"):
        main(["fit", *SCORER, *arguments, "--data.init_args.cache_salt=other"])
    assert "MissingKV: 9 of 9" in " ".join(capsys.readouterr().err.split())


def test_an_autoencoder_is_fitted_and_becomes_an_edit(arguments, connection):
    main(["fit", *AUTOENCODER, *arguments])
    checkpoint = Path("runs/autoencoder/checkpoints/best.ckpt")
    main(["predict", *AUTOENCODER, *arguments, "--ckpt_path", str(checkpoint), "--manifest", "manifest.jsonl"])
    (entry, *_) = Manifest.load("manifest.jsonl")
    edit = autoencoder(checkpoint, tiny_engine().config)
    with connection.connect() as ctx:
        wanted, _ = edit(ctx.retrieve(entry.tokens, arguments[4].split("=")[1]), entry.tokens)
        assert torch.equal(ctx.retrieve(entry.tokens, entry.salt), wanted)


def test_a_cartridge_is_trained_and_stands_for_its_document(arguments, connection):
    options = of_one_document(arguments)
    main(["fit", *CARTRIDGE, *options])
    checkpoint = Path("runs/cartridge/checkpoints/best.ckpt")
    main(["predict", *CARTRIDGE, *options, "--ckpt_path", str(checkpoint), "--manifest", "manifest.jsonl"])
    (entry,) = Manifest.load("manifest.jsonl")
    source = Prefixes.from_jsonl("windows.jsonl")[0].tokens.tolist()
    assert entry.tokens == source[:64]
    edit = cartridge(checkpoint, tiny_engine().config)
    with connection.connect() as ctx:
        wanted, _ = edit(ctx.retrieve(source, arguments[4].split("=")[1]), source)
        assert torch.equal(ctx.retrieve(entry.tokens, entry.salt), wanted)
