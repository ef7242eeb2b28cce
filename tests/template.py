"""A process that has imported kvdata and forks the servers of the tests.

Importing PyTorch takes seconds of processor time, and hundreds of servers are started: a fork has it already.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE = 60.0


class Forked:
    """A process that is not this one's child, and can be waited for all the same."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._end = os.pidfd_open(pid)

    def running(self) -> bool:
        return not select.select([self._end], [], [], 0)[0]

    def wait(self, seconds: float) -> None:
        """Until it has ended, or `TimeoutError`."""
        if not select.select([self._end], [], [], seconds)[0]:
            raise TimeoutError(f"process {self.pid} still runs after {seconds} s")

    def send_signal(self, number: signal.Signals) -> None:
        if self.running():
            os.kill(self.pid, number)

    def close(self) -> None:
        os.close(self._end)


def stands_still(pid: int) -> bool:
    """Whether all threads of a process have stopped."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return bool(states) and set(states) == {"T"}


class Template:
    """Forks processes that run the ``kvdata`` command."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.template"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.close)

    def start(self, arguments: Sequence[str], log: Path) -> Forked:
        """``kvdata ARGUMENTS``, its output appended to a file."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([list(arguments), str(log)]), file=self._process.stdin, flush=True)
        assert select.select([self._process.stdout], [], [], PATIENCE)[0], "the template of the servers hangs"
        return Forked(int(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


@functools.cache
def template() -> Template:
    """One for all tests of this process."""
    return Template()


def _run(arguments: list[str], log: str) -> None:
    """In the forked process: what ``python -m kvdata`` does."""
    from kvdata.cli import main

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, name, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        opened = os.open(name, flags, 0o644)
        os.dup2(opened, target)
        os.close(opened)
    os.dup2(1, 2)
    sys.argv = ["kvdata", *arguments]
    main()


def _serve() -> None:
    import kvdata.cli
    import kvdata.server  # noqa: F401 - what a server needs

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for what is forked
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
    for line in iter(sys.stdin.readline, ""):
        request: list[Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _run(*request)
                code = 0
            except SystemExit as done:
                code = done.code if isinstance(done.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    _serve()
