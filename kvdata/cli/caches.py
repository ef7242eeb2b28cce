"""Commands about caches: ``ingest``, ``coverage``, ``verify``, ``delete``."""

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
    load_model,
    model_name_of,
    out,
)


def ingest(
    sources: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            dir_okay=False,
            help='Prefix files, JSONL with a "prompt" or "text" per line, or text files.',
        ),
    ],
    engine: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="URL of an OpenAI-compatible server that computes the caches and stores them."),
    ] = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Folder of a Hugging Face model, or 'smollm2': computes the caches; with --engine it only finds out "
            "their packing."
        ),
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="Prefix file to write; default is the source, if that is one prefix file."),
    ] = None,
    url: Url = URL,
    http_url: HttpUrl = HTTP_URL,
    model_name: Model = None,
    served_name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Name that the engine serves the model under; default: as --model-name."),
    ] = None,
    tokenizer: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(exists=True, file_okay=False, help="Folder with the model's tokenizer, for texts."),
    ] = None,
    window: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Cut texts into prefixes of so many tokens; default is one prefix per text."),
    ] = None,
    continuation: Annotated[int, typer.Option(min=0, help="True tokens to keep after each prefix.")] = 0,
    cache_salt: Salt = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at the engine at a time.")] = 16,
    settle: Annotated[float, typer.Option(help="Seconds to wait for what the engine stores after its answer.")] = 20.0,
    packing: Packing = "auto",
    model_config: ModelConfig = None,
    timeout: Timeout = 60.0,
) -> None:
    """Fill the server with the caches of prompts, and write the prefix file that KVCacheDataset reads.

    What the server holds already is not computed again: after an interruption run the same command. The file then
    carries layout and packing. Exit code 3 unless the server holds all of it.
    """
    from kvdata.cli.ingest import Job, only_engine_at, through_engine, through_model

    if engine is None and model is None:
        raise typer.BadParameter("give --engine, or --model to compute the caches here")
    job = Job.of(
        sources,
        output,
        tokenizer,
        model,
        model_name,
        window,
        continuation,
        cache_salt,
        lambda: only_engine_at(http_url, timeout),
    )
    where = (url, http_url, timeout)
    if engine is None:
        assert model is not None
        complete = through_model(job, model, *where)
    else:
        complete = through_engine(job, engine, served_name, model, *where, concurrency, settle, packing, model_config)
    if not complete:
        raise typer.Exit(NOT_CACHED)


def coverage(
    prefixes: PrefixFile,
    url: Url = URL,
    http_url: HttpUrl = HTTP_URL,
    model_name: Model = None,
    cache_salt: Salt = "",
    timeout: Timeout = 60.0,
) -> None:
    """Count how many prefixes a server holds. Exit code 3 unless all are there."""
    from kvdata.datasets import KVCacheDataset, Prefixes

    records = Prefixes.from_jsonl(prefixes)
    dataset = KVCacheDataset(records, url, http_url, model_name, timeout, cache_salt=cache_salt)
    found = dataset.coverage()
    dataset.close()
    out.print(str(found))
    if len(found.hit) < len(records):
        raise typer.Exit(NOT_CACHED)


def delete(
    prefixes: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(exists=True, dir_okay=False, help="Prefix file (JSONL)."),
    ] = None,
    manifest: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(exists=True, dir_okay=False, help="Delete what a KVCacheWriter wrote instead."),
    ] = None,
    layout_from: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(exists=True, dir_okay=False, help="Prefix file that carries the layout, for --manifest."),
    ] = None,
    url: Url = URL,
    http_url: HttpUrl = HTTP_URL,
    model_name: Model = None,
    cache_salt: Salt = "",
    timeout: Timeout = 60.0,
) -> None:
    """Delete the KV of every prefix of a file, or of every cache of a manifest, from a server."""
    from kvdata.client.connection import Connection
    from kvdata.datasets import Manifest, Prefixes

    if (prefixes is None) == (manifest is None):
        raise typer.BadParameter("give a prefix file or --manifest")
    source = prefixes or layout_from
    described = Prefixes.from_jsonl(source) if source else Prefixes([])
    records = Manifest.load(manifest).prefixes() if manifest else described
    name = model_name_of(model_name, described.model_name)
    with Connection(url, http_url, name, timeout, described.layout).connect() as ctx:
        deleted = sum(ctx.delete(r.tokens, r.salt_or(cache_salt)) for r in records)
    out.print(f"{deleted} chunks deleted")


def verify(
    prefixes: PrefixFile,
    model: Annotated[str, typer.Option(help="Folder of the Hugging Face model, or 'smollm2'.")],
    url: Url = URL,
    http_url: HttpUrl = HTTP_URL,
    model_name: Model = None,
    timeout: Timeout = 60.0,
) -> None:
    """Find the packing of a cache by comparing it with the model, and remember it. Exit code 1 when none fits.

    A prefix file without a layout is given the one that was found.
    """
    from kvdata.client.connection import Connection
    from kvdata.client.verify import verify as compare
    from kvdata.datasets.prefixes import Prefixes

    records = Prefixes.from_jsonl(prefixes)
    name = model_name_of(model_name, records.model_name)
    engine = load_model(model)
    connection = Connection(url, http_url, name, timeout, records.layout, model_config=engine.config)
    found = compare(connection, engine, records[0].tokens.tolist(), records[0].salt or "")
    out.print(str(found), highlight=False, soft_wrap=True)
    if found.packing is None:
        raise typer.Exit(1)
    if records.layout is None:
        with connection.connect() as ctx:
            Prefixes(records, ctx.layout, name).to_jsonl(prefixes)
        out.print(f"{prefixes} carries the layout now", soft_wrap=True)
