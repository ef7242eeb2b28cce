"""The ``kvdata`` command in this process: what it prints and its exit code, without the seconds a new process needs."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest.mock import patch

from kvdata.cli import main


@dataclass(frozen=True)
class Finished:
    """As `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def kvdata(*arguments: str) -> Finished:
    """Run ``kvdata ARGUMENTS``."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "argv", ["kvdata", *arguments]),
    ):
        try:
            main()
        except SystemExit as done:
            code = done.code
    return Finished(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())
