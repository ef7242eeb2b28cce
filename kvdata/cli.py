"""The ``kvdata`` command. Exit codes: 0 done, 1 the operation failed, 2 wrong usage, 3 not (fully) cached."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track
    from rich.table import Table
except ImportError as missing:  # pragma: no cover - depends on the installation
    raise ImportError(f"the kvdata command needs {missing.name}: pip install 'kvdata[server]'") from missing

from kvdata import __version__
from kvdata.errors import KVCacheSDKError

# typer evaluates annotations at run time, on Python 3.10 too: hence Optional below, and not "| None".
app = typer.Typer(
    help="Train on live KV caches: an LMCache server's attention caches as PyTorch data.",
    no_args_is_help=True,
    add_completion=False,
)
out = Console()
err = Console(stderr=True)

NOT_CACHED = 3

Url = Annotated[str, typer.Option("--url", help="The server's ZMQ URL.")]
HttpUrl = Annotated[str, typer.Option("--http-url", help="The server's HTTP URL.")]
Model = Annotated[Optional[str], typer.Option("--model-name", help="Name under which the engine registered.")]  # noqa: UP045
Timeout = Annotated[float, typer.Option(help="Seconds within which each operation must end.")]
PrefixFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Prefix file (JSONL).")]

URL, HTTP_URL = "tcp://localhost:5555", "http://localhost:8080"


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


@app.command()
def serve(
    port: Annotated[int, typer.Option(help="ZMQ port; 0 takes a free one.")] = 5555,
    http_port: Annotated[int, typer.Option(help="HTTP port; 0 takes a free one.")] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    chunk_size: Annotated[int, typer.Option(help="Tokens in a chunk.")] = 256,
    pool_gb: Annotated[float, typer.Option(help="Memory for KV, in GiB.")] = 1.0,
    shm_name: Annotated[Optional[str], typer.Option(help="Name of the shared-memory pool.")] = None,  # noqa: UP045
    transfer: Annotated[str, typer.Option(help="'shm', or 'pickle' for clients on other hosts.")] = "shm",
    watermark: Annotated[float, typer.Option(help="Fill ratio at which eviction starts.")] = 0.8,
) -> None:
    """Run the embedded server: LMCache's protocol, for demos and tests on one machine."""
    from kvdata.server import EmbeddedServer

    server = EmbeddedServer(
        port=port,
        http_port=http_port,
        host=host,
        chunk_size=chunk_size,
        pool_bytes=int(pool_gb * 2**30),
        shm_name=shm_name,
        transfer=transfer,
        watermark=watermark,
    )
    server.run_forever(lambda: print(f"kvdata serve: {server.url} {server.http_url}", flush=True))


@app.command()
def status(http_url: HttpUrl = HTTP_URL, timeout: Timeout = 10.0) -> None:
    """Show what a server holds: release, chunk size, models, memory, locks."""
    from kvdata.client.discovery import Http, discover

    http = Http(http_url, timeout)
    try:
        info = discover(http)
        memory = http.json("GET", "/status")["storage_manager"]["l1_manager"]
    finally:
        http.close()
    table = Table(title=f"LMCache server at {http_url}", show_header=False)
    table.add_row("release", ".".join(map(str, info.release)))
    table.add_row("chunk size", f"{info.chunk_size} tokens")
    table.add_row("models of engines", "\n".join(info.engines) or "none")
    table.add_row("models of clients", "\n".join(sorted(set(info.clients.values()) | set(info.layouts))) or "none")
    table.add_row("memory", f"{memory['memory_used_bytes']:,} of {memory['memory_total_bytes']:,} bytes")
    table.add_row("chunks", f"{memory['total_object_count']:,}")
    table.add_row("read / write locks", f"{memory['read_locked_count']} / {memory['write_locked_count']}")
    out.print(table)


@app.command()
def ingest(
    prefixes: PrefixFile,
    model: Annotated[str, typer.Option(help="Folder of a Hugging Face model, or 'smollm2'.")],
    url: Url = URL,
    http_url: HttpUrl = HTTP_URL,
    model_name: Model = None,
    cache_salt: Annotated[str, typer.Option(help="Salt of records that carry none.")] = "",
    timeout: Timeout = 60.0,
) -> None:
    """Prefill every prefix with a Hugging Face model and store its KV; the file then carries the layout."""
    from kvdata.client.connection import Connection
    from kvdata.datasets.prefixes import Prefixes
    from kvdata.engines.huggingface import HuggingFaceEngine
    from kvdata.engines.smollm2 import smollm2_folder

    folder = smollm2_folder() if model == "smollm2" else Path(model)
    engine = HuggingFaceEngine.from_pretrained(folder)
    records = Prefixes.from_jsonl(prefixes)
    name = model_name or records.model_name or str(model)
    stored = 0
    with Connection(url, http_url, name, timeout, engine.layout).connect() as ctx:
        for record in track(records, description="prefill", console=err, total=len(records)):
            salt = cache_salt if record.salt is None else record.salt
            stored += engine.store_prefix(ctx, record.tokens.tolist(), salt)
        layout = ctx.layout
    Prefixes(records, layout, name).to_jsonl(prefixes)
    out.print(f"{stored} of {len(records)} prefixes stored, {len(records) - stored} were there already")


@app.command()
def coverage(
    prefixes: PrefixFile,
    url: Url = URL,
    http_url: HttpUrl = HTTP_URL,
    model_name: Model = None,
    cache_salt: Annotated[str, typer.Option(help="Salt of records that carry none.")] = "",
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


@app.command()
def doctor(
    model_name: Annotated[str, typer.Option(help="Name under which the engine registered the model.")],
    url: Url = URL,
    http_url: HttpUrl = HTTP_URL,
    prefixes: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(exists=True, dir_okay=False, help="Prefix file that carries the layout, where no engine runs."),
    ] = None,
    packing: Annotated[str, typer.Option(help="Byte order of a fused cache.")] = "auto",
    model_config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(exists=True, help="The model's config.json, for the heads of a fused cache."),
    ] = None,
    timeout: Timeout = 10.0,
) -> None:
    """Walk the connection step by step: what works, and what mends the first thing that does not (exit code 1)."""
    from kvdata.client.connection import Connection
    from kvdata.client.doctor import diagnose
    from kvdata.datasets.prefixes import Prefixes

    layout = Prefixes.from_jsonl(prefixes).layout if prefixes else None
    connection = Connection(url, http_url, model_name, timeout, layout, packing, model_config)
    healthy = True
    for check in diagnose(connection):
        healthy = check.ok
        mark = "[green]ok[/green]  " if check.ok else "[red]FAIL[/red]"
        out.print(f"{mark} [bold]{check.name:<10}[/bold] {escape(check.detail)}", highlight=False, soft_wrap=True)
    if not healthy:
        raise typer.Exit(1)


@app.command()
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
    cache_salt: Annotated[str, typer.Option(help="Salt of records that carry none.")] = "",
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
    name = model_name or described.model_name
    if name is None:
        raise typer.BadParameter("no file names the model", param_hint="--model-name")
    with Connection(url, http_url, name, timeout, described.layout).connect() as ctx:
        deleted = sum(ctx.delete(r.tokens, cache_salt if r.salt is None else r.salt) for r in records)
    out.print(f"{deleted} chunks deleted")


@app.command()
def verify(
    prefixes: PrefixFile,
    model: Annotated[str, typer.Option(help="Folder of the Hugging Face model, or 'smollm2'.")],
    url: Url = URL,
    http_url: HttpUrl = HTTP_URL,
    model_name: Model = None,
    timeout: Timeout = 60.0,
) -> None:
    """Find the packing of a cache by comparing it with the model, and remember it. Exit code 1 when none fits."""
    from kvdata.client.connection import Connection
    from kvdata.client.verify import verify as compare
    from kvdata.datasets.prefixes import Prefixes
    from kvdata.engines.huggingface import HuggingFaceEngine
    from kvdata.engines.smollm2 import smollm2_folder

    records = Prefixes.from_jsonl(prefixes)
    name = model_name or records.model_name
    if name is None:
        raise typer.BadParameter("the prefix file names no model", param_hint="--model-name")
    engine = HuggingFaceEngine.from_pretrained(smollm2_folder() if model == "smollm2" else Path(model))
    connection = Connection(url, http_url, name, timeout, records.layout)
    found = compare(connection, engine, records[0].tokens.tolist(), records[0].salt or "")
    out.print(str(found), highlight=False, soft_wrap=True)
    if found.packing is None:
        raise typer.Exit(1)


def main() -> None:
    """Entry point: kvdata's own errors become one line on stderr and exit code 1."""
    try:
        app()
    except KVCacheSDKError as exc:
        err.print(f"[red]{type(exc).__name__}[/red]: {exc}", highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
