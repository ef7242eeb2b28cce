"""Real text without a download: the language reference that ships inside Python's own standard library."""

from __future__ import annotations

from collections.abc import Iterable
from pydoc_data.topics import topics

from blake3 import blake3

from kvdata.datasets import Prefixes, PrefixRecord
from kvdata.datasets.prefixes import Tokenizer


def documentation_windows(tokenizer: Tokenizer, context_tokens: int, continuation_tokens: int) -> Prefixes:
    """Non-overlapping windows over all topics of ``pydoc``; ``meta["name"]`` is the document."""
    names = sorted(topics)
    labels = [{"name": name} for name in names]
    return Prefixes.from_text((topics[n] for n in names), tokenizer, context_tokens, continuation_tokens, labels)


def split_by_document(windows: Prefixes, held_out: int) -> tuple[Prefixes, Prefixes]:
    """``(training, held out)``: whole documents, in the order of their names' hashes, until ``held_out`` windows."""
    names = [record.meta["name"] for record in windows]
    chosen: set[str] = set()
    for name in sorted(set(names), key=lambda n: blake3(n.encode()).digest()):
        if sum(n in chosen for n in names) >= held_out:
            break
        chosen.add(name)
    return _where(windows, (n not in chosen for n in names)), _where(windows, (n in chosen for n in names))


def _where(windows: Prefixes, keep: Iterable[bool]) -> Prefixes:
    records: list[PrefixRecord] = [record for record, kept in zip(windows, keep, strict=True) if kept]
    return Prefixes(records)
