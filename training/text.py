"""Real text without a download: the language reference that ships inside Python's own standard library."""

from __future__ import annotations

from itertools import chain
from pydoc_data.topics import topics

from blake3 import blake3

from kvdata.datasets import Prefixes
from kvdata.datasets import split_by_document as splits_by_document
from kvdata.datasets.prefixes import Tokenizer


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
