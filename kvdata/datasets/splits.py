"""Training, validation and test prefixes that share no document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blake3 import blake3

from kvdata.datasets.prefixes import Prefixes
from kvdata.errors import InvalidRequest


@dataclass(frozen=True)
class DocumentSplits:
    """Prefixes of whole documents, in the order of the file they come from.

    Attributes:
        train, validation, test: the prefixes.
        documents: names of each split's documents, sorted.
    """

    train: Prefixes
    validation: Prefixes
    test: Prefixes
    documents: dict[str, list[str]]


def split_by_document(
    prefixes: Prefixes, held_out: int, validation: int = 0, key: str = "document", seed: int = 0
) -> DocumentSplits:
    """Whole documents for the test until it has enough prefixes, then for the validation, the others for training.

    They are taken in the order of their names' hashes: which split a document is in depends on no order of documents
    or prefixes, and the test's documents do not depend on ``validation``.

    Args:
        prefixes: each with the name of its document in ``meta``.
        held_out, validation: prefixes that the test and the validation have at least.
        key: under which ``meta`` names the document.
        seed: another gives other splits; 0 hashes the names alone.

    Raises:
        InvalidRequest: a record does not name its document, or no document is left for training.
    """
    if held_out < 0 or validation < 0:
        raise InvalidRequest(f"held_out and validation count prefixes, got {held_out} and {validation}")
    names = document_names(prefixes, key)
    sizes = Counter(names)
    left = iter(sorted(sizes, key=lambda name: _hash(name, seed)))
    chosen = {"test": _take(left, sizes, held_out), "validation": _take(left, sizes, validation)}
    chosen["train"] = sorted(left)
    if not chosen["train"]:
        raise InvalidRequest(
            f"no document is left for training: {len(sizes)} documents have {len(names)} prefixes, {held_out} are held "
            f"out and {validation} are for validation, of whole documents each; ask for fewer, or add documents"
        )
    parts = {split: _of_documents(prefixes, names, chosen[split]) for split in ("train", "validation", "test")}
    return DocumentSplits(**parts, documents=chosen)


def document_names(prefixes: Prefixes, key: str = "document") -> list[str]:
    """Name of each prefix's document; `InvalidRequest` when one does not tell."""
    names = []
    for place, record in enumerate(prefixes):
        if key not in record.meta:
            known = ", ".join(map(repr, record.meta)) or "nothing"
            raise InvalidRequest(
                f"prefix {place} does not name its document: its meta has {known}, not {key!r}; name another key with "
                "split_by=, or write the prefix file with one (kvdata ingest takes a line's other fields into meta)"
            )
        names.append(str(record.meta[key]))
    return names


def _take(names: Iterator[str], sizes: Counter[str], wanted: int) -> list[str]:
    """The next names, until their documents have so many prefixes; sorted."""
    taken: list[str] = []
    found = 0
    while found < wanted and (name := next(names, None)) is not None:
        taken.append(name)
        found += sizes[name]
    return sorted(taken)


def _of_documents(prefixes: Prefixes, names: list[str], documents: Iterable[str]) -> Prefixes:
    wanted = set(documents)
    return prefixes.select(place for place, name in enumerate(names) if name in wanted)


def _hash(name: str, seed: int) -> bytes:
    return blake3((f"{seed}:{name}" if seed else name).encode()).digest()
