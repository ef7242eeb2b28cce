"""The command ``snapshot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from kvdata.cli.options import (
    HTTP_URL,
    NOT_CACHED,
    URL,
    HttpUrl,
    Model,
    ModelConfig,
    Packing,
    PrefixFile,
    Salt,
    Timeout,
    Url,
    bar,
    err,
    out,
)
from kvdata.errors import MissingKV
from kvdata.layout import parse_dtype


def snapshot(
    prefixes: PrefixFile,
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Folder to write, or to go on with.")],
    url: Url = URL,
    http_url: HttpUrl = HTTP_URL,
    model_name: Model = None,
    cache_salt: Salt = "",
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Leave out what is not cached, instead of stopping at it.")
    ] = False,
    min_hit_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Take a prefix of which at least so many tokens are cached; default is all of it."),
    ] = None,
    layers: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Layers to keep, such as 0,5,11; default is all."),
    ] = None,
    dtype: Annotated[Optional[str], typer.Option(help="Convert to this dtype.")] = None,  # noqa: UP045
    shard_gb: Annotated[float, typer.Option(min=0.001, help="Largest size of a shard, in GB.")] = 1.0,
    packing: Packing = "auto",
    model_config: ModelConfig = None,
    timeout: Timeout = 60.0,
) -> None:
    """Copy the caches of a prefix file from a server into a folder that KVSnapshotDataset reads.

    What the folder holds already is not fetched again: after an interruption run the same command. Exit code 3 unless
    all of it was cached: then ingest what is missing, or take the rest with --skip-missing.
    """
    from kvdata.datasets import KVCacheDataset, Prefixes, Snapshot

    dataset = KVCacheDataset(
        Prefixes.from_jsonl(prefixes),
        url,
        http_url,
        model_name,
        timeout,
        packing=packing,
        model_config=model_config,
        cache_salt=cache_salt,
        on_missing="skip" if skip_missing else "raise",
        min_hit_tokens=min_hit_tokens,
        layers=_numbers(layers),
        dtype=parse_dtype(dtype) if dtype else None,
    )
    try:
        report = Snapshot.write(dataset, folder, shard_bytes=int(shard_gb * 10**9), progress=bar("snapshot"))
    except MissingKV as exc:
        err.print(f"{type(exc).__name__}: {exc}", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(NOT_CACHED) from exc
    out.print(f"{report}: {folder}", highlight=False, soft_wrap=True, markup=False)
    if report.skipped:
        raise typer.Exit(NOT_CACHED)


def _numbers(layers: str | None) -> list[int] | None:
    try:
        return [int(number) for number in layers.split(",")] if layers else None
    except ValueError as exc:
        raise typer.BadParameter("numbers with commas, such as 0,5,11", param_hint="--layers") from exc
