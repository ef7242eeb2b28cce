"""Which prefixes a dataset reads: token ids, true continuations, salts and labels, kept as flat arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from blake3 import blake3

from kvdata.errors import InvalidRequest
from kvdata.layout import KVLayout
from kvdata.wire.keys import Tokens, check_model_name, check_salt, token_list

_FILE_VERSION = 1


class Tokenizer(Protocol):
    """What `Prefixes.from_text` needs of a tokenizer; Hugging Face's fit."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True)
class PrefixRecord:
    """One prefix: its token ids, the true continuation, its salt (None: the dataset's), free labels."""

    tokens: np.ndarray = field(repr=False)
    continuation: np.ndarray = field(repr=False, default_factory=lambda: np.empty(0, np.int64))
    salt: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def salt_or(self, default: str) -> str:
        """Its own salt, or `default` when it carries none."""
        return default if self.salt is None else self.salt


class _Ragged:
    """Integer sequences of different lengths in one array; forked workers share its pages."""

    def __init__(self, rows: Iterable[Sequence[int]]) -> None:
        lengths, parts = [0], []
        for row in rows:
            parts.append(np.asarray(row, dtype=np.uint32))
            lengths.append(len(row))
        self.flat = np.concatenate(parts) if parts else np.empty(0, np.uint32)
        self.offsets = np.cumsum(lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.flat[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)


class Prefixes(Sequence[PrefixRecord]):
    """A sequence of prefix records, and optionally the layout of the cache that holds them.

    Args:
        records: the prefixes.
        layout: geometry and packing of the model's cache, so that a later run needs no engine to tell.
        model_name: the model whose cache is meant.
    """

    def __init__(
        self, records: Iterable[PrefixRecord], layout: KVLayout | None = None, model_name: str | None = None
    ) -> None:
        kept = list(records)
        self._tokens = _Ragged(token_list(r.tokens) for r in kept)
        self._continuations = _Ragged(token_list(r.continuation) for r in kept)
        self._salts = [r.salt for r in kept]
        self._meta = [dict(r.meta) for r in kept]
        for salt in self._salts:
            if salt is not None:
                check_salt(salt)
        self.layout = layout
        self.model_name = model_name

    def __len__(self) -> int:
        return len(self._salts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"prefix {index} of {len(self)}")
        index = index % len(self)
        return PrefixRecord(
            self._tokens[index], self._continuations[index], self._salts[index], dict(self._meta[index])
        )

    def __iter__(self) -> Iterator[PrefixRecord]:
        return (self[i] for i in range(len(self)))

    def lengths(self) -> np.ndarray:
        """Tokens of each prefix."""
        return np.diff(self._tokens.offsets)

    def digest(self) -> str:
        """16 hex digits that tell these token ids and salts, in this order, from others."""
        digest = blake3(self._tokens.offsets.tobytes())
        digest.update(self._tokens.flat.tobytes())
        digest.update(json.dumps(self._salts).encode())
        return digest.hexdigest(8)

    def select(self, indices: Iterable[int]) -> Prefixes:
        """The records at ``indices``, with the same layout and model."""
        return Prefixes((self[i] for i in indices), self.layout, self.model_name)

    @classmethod
    def of(cls, prefixes: Prefixes | Iterable[Any]) -> Prefixes:
        """Make `Prefixes` of what users have: records, mappings with ``tokens``, lists or arrays of ids."""
        return prefixes if isinstance(prefixes, Prefixes) else cls(_record(p) for p in prefixes)

    @classmethod
    def from_text(
        cls,
        texts: Iterable[str],
        tokenizer: Tokenizer,
        context_tokens: int,
        continuation_tokens: int = 0,
        meta: Iterable[Mapping[str, Any]] | None = None,
    ) -> Prefixes:
        """Non-overlapping windows of ``context_tokens + continuation_tokens`` over each text.

        Each record's ``meta`` has the text's number (``document``) and the window's (``window``), plus the
        text's entry of ``meta``. A text's last, incomplete window is left out.
        """
        size = context_tokens + continuation_tokens
        if context_tokens < 1 or continuation_tokens < 0:
            raise InvalidRequest("context_tokens must be at least 1 and continuation_tokens at least 0")
        records = []
        extra = iter(meta) if meta is not None else None
        for document, text in enumerate(texts):
            labels = dict(next(extra)) if extra is not None else {}
            ids = np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
            for window in range(len(ids) // size):
                part = ids[window * size : (window + 1) * size]
                labels_here = {"document": document, "window": window, **labels}
                records.append(PrefixRecord(part[:context_tokens], part[context_tokens:], None, labels_here))
        return cls(records)

    @classmethod
    def from_jsonl(cls, path: str | Path) -> Prefixes:
        """Read a prefix file. Lines are records; a first line ``{"kvdata": 1, ...}`` carries the layout."""
        records, layout, model_name = [], None, None
        for number, entry in json_lines(path):
            try:
                if "kvdata" in entry:
                    layout, model_name = _header(entry)
                else:
                    records.append(_record(entry))
            except (ValueError, TypeError) as exc:
                raise InvalidRequest(f"{path}, line {number}: {exc}") from exc
        return cls(records, layout, model_name)

    def to_jsonl(self, path: str | Path) -> None:
        """Write a prefix file that `from_jsonl` reads back equal: whole, or not at all."""
        path = Path(path)
        part = path.with_name(path.name + ".part")
        with open(part, "w", encoding="utf-8") as file:
            file.writelines(self.lines())
        part.replace(path)

    def lines(self) -> Iterator[str]:
        """The lines of a prefix file; `InvalidRequest` names the record whose ``meta`` JSON cannot hold."""
        layout = self.layout.to_dict() if self.layout else None
        yield json.dumps({"kvdata": _FILE_VERSION, "model_name": self.model_name, "layout": layout}) + "\n"
        for place, record in enumerate(self):
            entry: dict[str, Any] = {"tokens": record.tokens.tolist()}
            if len(record.continuation):
                entry["continuation"] = record.continuation.tolist()
            if record.salt is not None:
                entry["salt"] = record.salt
            if record.meta:
                entry["meta"] = record.meta
            try:
                line = json.dumps(entry)
            except (TypeError, ValueError) as exc:
                raise InvalidRequest(f"meta of prefix {place} cannot be written as JSON: {exc}") from exc
            yield line + "\n"


def json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Number and value of each line that is not blank; `InvalidRequest` names the one that is not JSON."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as exc:  # the latter for what is nested a thousand deep
                raise InvalidRequest(f"{path}, line {number}: {exc}") from exc
            yield number, entry


def _header(entry: Mapping[str, Any]) -> tuple[KVLayout | None, str | None]:
    if entry["kvdata"] != _FILE_VERSION:
        raise InvalidRequest(f"prefix file of version {entry['kvdata']}; this kvdata reads version {_FILE_VERSION}")
    layout, model_name = entry.get("layout"), entry.get("model_name")
    if model_name is not None:
        check_model_name(model_name)
    return (KVLayout.from_dict(layout) if layout else None), model_name


def _record(value: PrefixRecord | Mapping[str, Any] | Tokens) -> PrefixRecord:
    if isinstance(value, PrefixRecord):
        return value
    if not isinstance(value, Mapping):
        return PrefixRecord(np.asarray(token_list(value), dtype=np.int64))
    if "tokens" not in value:
        raise InvalidRequest("a prefix record needs 'tokens'")
    unknown = set(value) - {"tokens", "continuation", "salt", "meta"}
    if unknown:
        raise InvalidRequest(f"unknown fields in a prefix record: {', '.join(sorted(unknown))}; put them into 'meta'")
    salt = value.get("salt")
    if salt is not None:
        check_salt(salt)
    return PrefixRecord(
        np.asarray(token_list(value["tokens"]), dtype=np.int64),
        np.asarray(token_list(value.get("continuation") or []), dtype=np.int64),
        salt,
        dict(value.get("meta") or {}),
    )
