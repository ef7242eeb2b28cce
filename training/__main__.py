"""One recipe on live caches: ``python -m training fit|validate|test|predict --config training/configs/NAME.yaml``.

Every argument of the YAML can be given on the command line too, e.g. ``--data.url tcp://localhost:5555``.
``--trainer.fast_dev_run true`` tries one batch of everything and stores nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console

from kvdata.errors import KVCacheSDKError
from kvdata.lightning import KVCacheWriter

try:
    from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
except ImportError as missing:
    raise ImportError("python -m training needs jsonargparse: pip install 'kvdata[train]'") from missing


class RecipeCLI(LightningCLI):
    """A LightningCLI whose ``predict`` stores the compressed caches in the server they were made from."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--manifest", type=str, default=None, help="JSONL file that predict writes addresses to")

    def before_fit(self) -> None:
        """Lightning 2.6 writes ``last.ckpt`` at the end of a ``fast_dev_run`` too, which should leave nothing."""
        if self.trainer.fast_dev_run:
            for callback in self.trainer.checkpoint_callbacks:
                callback.save_last = False

    def before_validate(self) -> None:
        self._spare_losses()

    def before_test(self) -> None:
        self._spare_losses()

    def before_predict(self) -> None:
        self._spare_losses()
        manifest = self.config[self.subcommand].manifest or Path(self.trainer.default_root_dir) / "manifest.jsonl"
        source = self.datamodule.dataset("predict")
        self.trainer.callbacks.append(
            KVCacheWriter(source.connection, manifest, stages=["predict"], retries=source.retries)
        )

    def _spare_losses(self) -> None:
        """A CSVLogger would delete what the fit wrote to its folder; what is measured now is printed."""
        self.trainer.loggers = []

    def predict(self, model: L.LightningModule, **options: Any) -> None:
        """Run the recipe over the held-out caches; results go through the writer, not into memory."""
        self.trainer.predict(model, **{**options, "return_predictions": False})


def main(args: ArgsType = None) -> None:
    """Entry point: kvdata's own errors become one line on stderr and exit code 1."""
    try:
        RecipeCLI(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            args=args,
        )
    except KVCacheSDKError as exc:
        Console(stderr=True).print(f"[red]{type(exc).__name__}[/red]: {exc}", highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
