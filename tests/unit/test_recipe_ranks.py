"""The recipes on two ranks, real processes that talk by gloo: the same weights on both, and one manifest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from kvdata.datasets import Manifest
from kvdata.edits.functions import weights_revision
from tests.unit.ranks import run_ranks
from tests.unit.recipes import AUTOENCODER, CARTRIDGE, SCORER, arguments_for, of_one_document

pytestmark = pytest.mark.timeout(450)  # two processes import everything first, perhaps on a busy machine

RANKS = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.callbacks+=tests.unit.test_recipe_ranks.Notes"]
RECIPES = {"token-scorer": SCORER, "autoencoder": AUTOENCODER, "cartridge": CARTRIDGE}


class Notes(L.Callback):
    """Writes down what each rank has: weights at the first step, behind the last and at predict; and what is logged."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, index) -> None:
        self.found.setdefault("begun", weights_revision(pl_module.compressor))

    def on_fit_end(self, trainer, pl_module) -> None:
        self.found["ended"] = weights_revision(pl_module.compressor)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.found["logged"] = {name: value for name, value in logged.items() if name.startswith("val")}
        path = Path(trainer.default_root_dir) / f"rank-{trainer.global_rank}.json"
        path.write_text(json.dumps(self.found))


def rank(folder: str) -> None:
    """One rank of all runs."""
    import warnings

    from training.__main__ import main

    warnings.simplefilter("ignore")
    os.chdir(folder)
    options = json.loads(Path("options.json").read_text())
    for name, recipe in RECIPES.items():
        given = [*recipe, *(of_one_document(options) if name == "cartridge" else options), *RANKS]
        best = ["--ckpt_path", f"runs/{name}/checkpoints/best.ckpt"]
        main(["fit", *given])
        main(["test", *given, *best])
        main(["predict", *given, *best, "--manifest", f"{name}.jsonl"])


@pytest.fixture(scope="module")
def folder(embedded, tmp_path_factory) -> Path:
    """Where both ranks have run all recipes."""
    from kvdata import Connection
    from tests.unit.conftest import LAYOUT

    folder = tmp_path_factory.mktemp("ranks")
    connection = Connection(embedded.url, embedded.http_url, "unit/model", 30.0, LAYOUT)
    (folder / "options.json").write_text(json.dumps(arguments_for(connection, folder)))
    run_ranks(folder, __name__, str(folder), variables={"OMP_NUM_THREADS": "1"})
    return folder


@pytest.mark.parametrize("name", list(RECIPES))
def test_both_ranks_have_the_same_weights_and_see_the_same_figures(folder, name):
    first, second = (json.loads((folder / "runs" / name / f"rank-{number}.json").read_text()) for number in range(2))
    assert first == second
    assert first["begun"] != first["ended"]
    assert first["logged"]


@pytest.mark.parametrize(("name", "count"), [("token-scorer", 3), ("autoencoder", 3), ("cartridge", 1)])
def test_both_ranks_write_one_manifest(folder, name, count):
    assert len((folder / f"{name}.jsonl").read_text().splitlines()) == count
    assert len(Manifest.load(folder / f"{name}.jsonl")) == count
    assert not list(folder.glob("*.part"))
