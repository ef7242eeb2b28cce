"""Two ranks of a run, as Lightning starts them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_ranks(folder: Path, module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> None:
    """Call ``rank(*arguments)`` of a test module in a process of its own; Lightning repeats its command for the other.

    Args:
        folder: for the script, and ``log``, the output of both.
        variables: more of the environment.
    """
    script = folder / "run.py"
    code = f"import os, sys; from {module} import rank; rank(*sys.argv[1:]); os._exit(0)"
    script.write_text(code)  # _exit saves the seconds that it takes to tear down an interpreter with torch in it
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **(variables or {})}
    command, log = [sys.executable, str(script), *arguments], folder / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        assert process.wait(400) == 0, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):  # the other rank, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
