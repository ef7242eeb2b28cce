"""Options and small helpers that the commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    import torch

    from kvdata.datasets.ingest import Progress
    from kvdata.engines.huggingface import HuggingFaceEngine

# typer evaluates annotations at run time, on Python 3.10 too: hence Optional below, and not "| None".
out = Console()
err = Console(stderr=True)

NOT_CACHED = 3
URL, HTTP_URL = "tcp://localhost:5555", "http://localhost:8080"

Url = Annotated[str, typer.Option("--url", help="The server's ZMQ URL.")]
HttpUrl = Annotated[str, typer.Option("--http-url", help="The server's HTTP URL.")]
Model = Annotated[Optional[str], typer.Option("--model-name", help="Name under which the engine registered.")]  # noqa: UP045
Timeout = Annotated[float, typer.Option(help="Seconds within which each operation must end.")]
Salt = Annotated[str, typer.Option(help="Salt of records that carry none.")]
Packing = Annotated[str, typer.Option(help="Byte order of a fused cache.")]
ModelConfig = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(exists=True, help="The model's config.json, for the heads of a fused cache."),
]
PrefixFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Prefix file (JSONL).")]


def load_model(model: str, dtype: torch.dtype | None = None) -> HuggingFaceEngine:
    """The Hugging Face model of a folder, or ``smollm2``; computes in float32 unless a dtype is given."""
    import torch

    from kvdata.engines.huggingface import HuggingFaceEngine

    return HuggingFaceEngine.from_pretrained(model_folder(model), dtype=dtype or torch.float32)


def model_folder(model: str) -> Path:
    """The folder that ``--model`` means."""
    from kvdata.engines.smollm2 import smollm2_folder

    return smollm2_folder() if model == "smollm2" else Path(model)


def bar(description: str) -> Progress:
    """A progress bar on stderr, where that is a terminal."""

    def wrapped(items: Iterable[Any], total: int) -> Iterable[Any]:
        return track(items, description=description, console=err, total=total, disable=not sys.stderr.isatty())

    return wrapped


def model_name_of(given: str | None, in_file: str | None) -> str:
    """The model's name, which must be known; exit code 2 when it is not."""
    name = given or in_file
    if name is None:
        raise typer.BadParameter("no file names the model", param_hint="--model-name")
    return name
