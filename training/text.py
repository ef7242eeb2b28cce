"""Real text without a download: the documentation that ships inside Python's own standard library.

``python -m training.text runs/windows.jsonl`` writes the prefix file that the recipes are trained and judged on, and
with ``--needles runs/needles.jsonl`` one of windows with hidden facts that the token scorer is trained on besides.
"""

from __future__ import annotations

import argparse
import ast
import sys
import sysconfig
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

from blake3 import blake3

from kvdata.cli.options import model_folder
from kvdata.datasets import Prefixes
from kvdata.datasets import split_by_document as splits_by_document
from kvdata.datasets.prefixes import Tokenizer
from training.needles import needle_windows

_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def library_windows(tokenizer: Tokenizer, context_tokens: int, continuation_tokens: int) -> Prefixes:
    """Windows over the language reference and the docstrings of every top-level module of the standard library.

    ``meta["name"]`` is the document: a topic of the reference, or ``module NAME``.
    """
    texts = {**topics, **_docstrings()}
    names = sorted(texts)
    labels = [{"name": name} for name in names]
    return Prefixes.from_text((texts[n] for n in names), tokenizer, context_tokens, continuation_tokens, labels)


def package_texts() -> list[str]:
    """The docstrings of each package of the standard library: no text of `library_windows`."""
    folders = (_LIBRARY / name for name in sorted(sys.stdlib_module_names))
    sources = ([path for path in sorted(folder.rglob("*.py")) if "tests" not in path.parts] for folder in folders)
    return ["\n\n".join(map(_docstrings_of, paths)) for paths in sources if paths]


def _docstrings() -> dict[str, str]:
    """The docstrings of each module of the standard library, read from its source: nothing is imported."""
    return {f"module {path.stem}": _docstrings_of(path) for path in sorted(_LIBRARY.glob("*.py"))}


def _docstrings_of(path: Path) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, documented)]
    return "\n\n".join(text for n in nodes if (text := ast.get_docstring(n)))


def documentation_windows(tokenizer: Tokenizer, context_tokens: int, continuation_tokens: int) -> Prefixes:
    """Non-overlapping windows over all topics of ``pydoc``; ``meta["name"]`` is the document."""
    names = sorted(topics)
    labels = [{"name": name} for name in names]
    return Prefixes.from_text((topics[n] for n in names), tokenizer, context_tokens, continuation_tokens, labels)


def prompts_and_windows(
    tokenizer: Tokenizer, prompts: int, prompt_tokens: int, context_tokens: int, continuation_tokens: int
) -> tuple[list[list[int]], Prefixes]:
    """``(prompts, training windows)``: long prompts out of some documents, windows out of the others.

    Documents are joined, in the order of their names' hashes, since few are long enough alone.
    """
    ids = {name: list(tokenizer.encode(topics[name], add_special_tokens=False)) for name in sorted(topics, key=_hash)}
    held_out: list[int] = []
    names = iter(ids)
    while len(held_out) < prompts * prompt_tokens:
        held_out += ids[next(names)]
    rest = list(chain.from_iterable(ids[name] for name in names))
    size = context_tokens + continuation_tokens
    windows = [rest[start : start + size] for start in range(0, len(rest) - size + 1, size)]
    return (
        [held_out[i * prompt_tokens : (i + 1) * prompt_tokens] for i in range(prompts)],
        Prefixes.of({"tokens": w[:context_tokens], "continuation": w[context_tokens:]} for w in windows),
    )


def split_by_document(windows: Prefixes, held_out: int) -> tuple[Prefixes, Prefixes]:
    """``(training, held out)`` of the windows of `documentation_windows`, as `kvdata.datasets.splits` chooses them."""
    splits = splits_by_document(windows, held_out, key="name")
    return splits.train, splits.test


def _hash(name: str) -> bytes:
    return blake3(name.encode()).digest()


def main() -> None:
    """Write the windows of `library_windows` as a prefix file, and windows with hidden facts as another."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(prog="python -m training.text", description=main.__doc__)
    parser.add_argument("out", type=Path, help="prefix file to write (JSONL)")
    parser.add_argument("--needles", type=Path, help="prefix file for windows with hidden facts")
    parser.add_argument("--model", default="smollm2", help="folder of the model, or smollm2")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--continuation", type=int, default=128, help="tokens that follow it")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(model_folder(options.model))
    _write(library_windows(tokenizer, options.context, options.continuation), options.out)
    if options.needles:
        _write(needle_windows(tokenizer, package_texts(), options.context, options.continuation), options.needles)


def _write(windows: Prefixes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    windows.to_jsonl(path)
    documents = len({record.meta["name"] for record in windows})
    print(f"{len(windows)} windows of {documents} documents: {path}")


if __name__ == "__main__":
    main()
