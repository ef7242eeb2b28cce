"""Run a soak, print what came of it; exit code 1 when anything was violated."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tests.faults.soak.report import show
from tests.faults.soak.run import Soak
from tests.servers import release_of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load")
    parser.add_argument("--server", default="embedded", help="'embedded', or the path of an lmcache command")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of what is drawn")
    parser.add_argument("--keep", type=Path, help="folder that keeps journals and logs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 130)
    release = ".".join(map(str, release_of(given.server)))
    name = given.server if given.server == "embedded" else f"LMCache {release}"
    console.print(f"soak of {given.minutes:g} minutes on {name}, seed {given.seed}")
    columns = TextColumn("{task.description:28}"), BarColumn(), TimeRemainingColumn()
    with tempfile.TemporaryDirectory(prefix="kvdata-soak-") as folder, Progress(*columns, console=console) as progress:
        kept = given.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        outcome = Soak(given.server, 60 * given.minutes, given.seed, kept, progress).run()
    if outcome.figures:
        show(outcome.figures, console)
    for violation in outcome.violations:
        console.print(f"VIOLATED {violation}", markup=False, style="red", soft_wrap=True)
    if not outcome.violations:
        console.print("0 wrong tensors, 0 hangs, 0 leaks, and the counts add up")
    if given.json:
        given.json.write_text(json.dumps({**outcome.figures, "violations": outcome.violations}))
    return bool(outcome.violations)


if __name__ == "__main__":
    sys.exit(main())
