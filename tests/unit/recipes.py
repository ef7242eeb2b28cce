"""What ``python -m training`` is tested on: the shipped configurations, a tiny model, and its caches in a server."""

from __future__ import annotations

from pathlib import Path

from kvdata import Connection
from kvdata.datasets import Prefixes
from tests.unit.conftest import fresh_tokens
from tests.unit.tiny_model import tiny_engine, tiny_folder, windows

CONTEXT, CONTINUATION = 128, 16

_CONFIGS = Path(__file__).parents[2] / "training" / "configs"
SCORER = ["--config", str(_CONFIGS / "token_scorer.yaml"), "--model.init_args.keeps=[64]"]
SCORER += ["--data.init_args.more_training=null"]
AUTOENCODER = ["--config", str(_CONFIGS / "autoencoder.yaml"), "--model.init_args.context_tokens=128"]
CARTRIDGE = ["--config", str(_CONFIGS / "cartridge.yaml"), "--trainer.check_val_every_n_epoch=1"]
_SMALL = {"slots": 64, "sinks": 2, "text_tokens": 16, "continuations": 6, "openings": 0, "held_out": 2, "references": 2}
CARTRIDGE += [f"--model.init_args.{name}={value}" for name, value in _SMALL.items()]


def arguments_for(connection: Connection, folder: Path) -> list[str]:
    """Options that point a configuration at twelve caches of four documents of the tiny model."""
    engine = tiny_engine()
    salt = f"recipe-{fresh_tokens(1)[0]}"
    records = windows(12, CONTEXT, CONTINUATION, seed=3)
    with connection.connect() as ctx:
        for number, record in enumerate(records):
            engine.store_prefix(ctx, record["tokens"], salt)
            record["meta"] = {"name": f"document {number % 4}"}
    Prefixes(Prefixes.of(records), connection.layout, connection.model_name).to_jsonl(folder / "windows.jsonl")
    return [
        f"--model.init_args.model={tiny_folder(folder / 'model')}",
        "--data.init_args.prefixes=windows.jsonl",
        f"--data.init_args.url={connection.url}",
        f"--data.init_args.http_url={connection.http_url}",
        f"--data.init_args.cache_salt={salt}",
        "--data.init_args.held_out=3",
        "--data.init_args.validation=3",
        "--trainer.max_epochs=2",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.log_every_n_steps=1",
    ]


def of_one_document(arguments: list[str]) -> list[str]:
    """The same for a recipe that has no splits."""
    return [argument for argument in arguments if "held_out" not in argument and "validation" not in argument]
