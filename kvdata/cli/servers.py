"""Commands about servers: ``serve``, ``status``, ``doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.markup import escape
from rich.table import Table

from kvdata.cli.options import HTTP_URL, URL, HttpUrl, ModelConfig, Packing, Timeout, Url, out
from kvdata.errors import ProtocolError


def serve(
    port: Annotated[int, typer.Option(help="ZMQ port; 0 takes a free one.")] = 5555,
    http_port: Annotated[int, typer.Option(help="HTTP port; 0 takes a free one.")] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    chunk_size: Annotated[int, typer.Option(help="Tokens in a chunk.")] = 256,
    pool_gb: Annotated[float, typer.Option(help="Memory for KV, in GiB.")] = 1.0,
    shm_name: Annotated[Optional[str], typer.Option(help="Name of the shared-memory pool.")] = None,  # noqa: UP045
    transfer: Annotated[str, typer.Option(help="'shm', or 'pickle' for clients on other hosts.")] = "shm",
    watermark: Annotated[float, typer.Option(help="Fill ratio at which eviction starts.")] = 0.8,
    l1_write_ttl_seconds: Annotated[float, typer.Option(help="Life of a reservation that is not committed.")] = 600.0,
    l1_read_ttl_seconds: Annotated[float, typer.Option(help="Life of a read lock that is not released.")] = 300.0,
    session_ttl_seconds: Annotated[float, typer.Option(help="Life of a session that is not ended.")] = 600.0,
    worker_registration_grace_seconds: Annotated[float, typer.Option(help="Life of a silent registration.")] = 3600.0,
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
        write_ttl=l1_write_ttl_seconds,
        read_ttl=l1_read_ttl_seconds,
        session_ttl=session_ttl_seconds,
        grace_seconds=worker_registration_grace_seconds,
    )
    server.run_forever(lambda: print(f"kvdata serve: {server.url} {server.http_url}", flush=True))


def status(http_url: HttpUrl = HTTP_URL, timeout: Timeout = 10.0) -> None:
    """Show what a server holds: release, memory, hits, locks, and who is registered."""
    from kvdata.client.counters import read_counters
    from kvdata.client.discovery import discover, registrations
    from kvdata.client.http import Http

    http = Http(http_url, timeout)
    try:
        info = discover(http)
        answer = http.json("GET", "/status")
        counts = read_counters(http)
    finally:
        http.close()
    try:
        memory: dict[str, Any] = answer["storage_manager"]["l1_manager"]
        used, total = memory["memory_used_bytes"], memory["memory_total_bytes"]
    except (KeyError, TypeError) as exc:
        raise ProtocolError(f"{http_url}/status does not say how much memory is used ({exc})") from exc
    table = Table(title=f"LMCache server at {http_url}", show_header=False)
    table.add_row("release", ".".join(map(str, info.release)))
    table.add_row("chunk size", f"{info.chunk_size} tokens")
    table.add_row("memory", f"{used:,} of {total:,} bytes, {used / max(total, 1):.1%}")
    table.add_row("chunks", f"{memory['total_object_count']:,}")
    table.add_row("chunks written / read", f"{counts.stored_chunks:,} / {counts.retrieved_chunks:,}")
    if counts.requested_tokens and counts.hit_tokens is not None:
        rate = counts.hit_tokens / counts.requested_tokens
        table.add_row("tokens looked up / hit", f"{counts.requested_tokens:,} / {counts.hit_tokens:,}, {rate:.1%}")
    table.add_row("read / write locks", f"{memory['read_locked_count']} / {memory['write_locked_count']}")
    out.print(table)
    registered = Table(title="registered models")
    for column in ("model", "by", "workers", "cache"):
        registered.add_column(column, overflow="fold")
    for entry in registrations(answer):
        registered.add_row(escape(entry.model_name), entry.by, str(entry.world_size), escape(entry.cache))
    out.print(registered if registered.row_count else "no model is registered")


def doctor(
    model_name: Annotated[str, typer.Option(help="Name under which the engine registered the model.")],
    url: Url = URL,
    http_url: HttpUrl = HTTP_URL,
    prefixes: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(exists=True, dir_okay=False, help="Prefix file that carries the layout, where no engine runs."),
    ] = None,
    packing: Packing = "auto",
    model_config: ModelConfig = None,
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
