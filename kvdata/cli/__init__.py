"""The ``kvdata`` command. Exit codes: 0 done, 1 the operation failed, 2 wrong usage, 3 not (fully) cached."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

try:
    import typer
    from rich.markup import escape

    from kvdata.cli import caches, evaluate, servers, snapshot
    from kvdata.cli.options import err, out
except ImportError as missing:  # pragma: no cover - depends on the installation
    raise ImportError(f"the kvdata command needs {missing.name}: pip install 'kvdata[server]'") from missing

from kvdata import __version__
from kvdata.errors import KVCacheSDKError

app = typer.Typer(
    help="Train on live KV caches: an LMCache server's attention caches as PyTorch data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # prompts are among them
)
COMMANDS: tuple[Callable[..., None], ...] = (
    servers.serve,
    servers.status,
    servers.doctor,
    caches.ingest,
    caches.coverage,
    caches.verify,
    caches.delete,
    snapshot.snapshot,
    evaluate.evaluate,
)
for command in COMMANDS:
    app.command()(command)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: kvdata's own errors, and a missing extra, become one line on stderr and exit code 1."""
    try:
        app()
    except (KVCacheSDKError, ImportError) as exc:
        err.print(f"[red]{type(exc).__name__}[/red]: {escape(str(exc))}", highlight=False, soft_wrap=True)
        sys.exit(1)
