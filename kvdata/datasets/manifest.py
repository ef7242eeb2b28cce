"""What a `KVCacheWriter` wrote: where each compressed cache is, and how an engine is asked for it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvdata.datasets.prefixes import Prefixes
from kvdata.edits.address import source_digest
from kvdata.errors import InvalidRequest, MissingKV
from kvdata.wire.keys import Tokens, check_salt, token_list


@dataclass(frozen=True)
class Written:
    """One line of a manifest.

    Attributes:
        source: digest of the whole prefix that was compressed, of ``source_tokens`` tokens.
        tokens, salt: the address of the compressed cache.
        policy, revision: what made it.
        bytes: size of the compressed cache.
        result: ``"stored"``, or ``"deduplicated"`` where the server had it already.
        meta: labels.
    """

    source: str
    source_tokens: int
    tokens: list[int] = field(repr=False)
    salt: str
    policy: str
    revision: str
    bytes: int
    result: str = "stored"
    meta: dict[str, Any] = field(default_factory=dict)

    def checked(self) -> Written:
        """Itself; `InvalidRequest` when its fields are not what an address is made of."""
        texts = (self.source, self.policy, self.revision, self.result)
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.meta, dict):
            raise InvalidRequest("names must be text, and labels a mapping")
        if not all(type(number) is int and number >= 0 for number in (self.source_tokens, self.bytes)):
            raise InvalidRequest("source_tokens and bytes must be numbers")
        check_salt(self.salt)
        token_list(self.tokens)
        return self

    def line(self) -> str:
        """The line; `InvalidRequest` when JSON cannot hold its labels."""
        try:
            return json.dumps(asdict(self)) + "\n"
        except (TypeError, ValueError) as exc:
            raise InvalidRequest(f"meta of the cache under salt {self.salt!r} is not for JSON: {exc}") from exc


class Manifest(Sequence[Written]):
    """The lines of a manifest file, later ones replacing earlier ones of the same address."""

    def __init__(self, entries: Sequence[Written]) -> None:
        self._entries = list({(tuple(e.tokens), e.salt): e for e in entries}.values())

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        """Read a manifest; `InvalidRequest` names the line that is none."""
        return cls.parse(Path(path).read_bytes(), path)

    @classmethod
    def parse(cls, content: bytes, path: str | Path) -> Manifest:
        """The manifest that a file holds; errors as `load`."""
        entries = []
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                entries.append(Written(**json.loads(line)).checked())
            except (ValueError, TypeError, RecursionError) as exc:
                raise InvalidRequest(f"{path}, line {number}, is not a line of a manifest: {exc}") from exc
        return cls(entries)

    def save(self, path: str | Path) -> None:
        """Write it, one line for each address: whole, or not at all."""
        path = Path(path)
        new = path.with_name(path.name + ".new")
        with open(new, "w", encoding="utf-8") as file:
            file.writelines(entry.line() for entry in self)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: Any) -> Any:
        return Manifest(self._entries[index]) if isinstance(index, slice) else self._entries[index]

    def select(self, policy: str | None = None, kept: int | None = None) -> Manifest:
        """The caches of one policy and of one size in tokens."""
        return Manifest([e for e in self._entries if policy in (None, e.policy) and kept in (None, len(e.tokens))])

    def prefixes(self) -> Prefixes:
        """The written caches as prefix records: addresses and salts, with the manifest's labels."""
        return Prefixes.of({"tokens": e.tokens, "salt": e.salt, "meta": e.meta} for e in self._entries)

    def request_for(self, prompt: Tokens) -> tuple[list[int], str]:
        """Token ids and ``cache_salt`` of the request by which an engine continues ``prompt`` from a written cache.

        The longest written source that ``prompt`` begins with is replaced by its compressed cache's ids; what follows
        it in the prompt stays. An engine always computes at least the last token itself: a prompt that ends with the
        source has nothing left to compute, so give at least one token more.

        Raises:
            MissingKV: no written cache was made from a prefix of ``prompt``.
            InvalidRequest: several were (use `select` first).
        """
        ids = token_list(prompt)
        for length in sorted({e.source_tokens for e in self._entries if e.source_tokens <= len(ids)}, reverse=True):
            digest = source_digest(ids[:length])
            found = [e for e in self._entries if (e.source_tokens, e.source) == (length, digest)]
            if len(found) > 1:
                names = ", ".join(f"{e.policy} ({len(e.tokens)} tokens)" for e in found)
                raise InvalidRequest(f"several caches were written of this prompt: {names}; choose with select()")
            if found:
                return found[0].tokens + ids[length:], found[0].salt
        raise MissingKV(f"none of the {len(self)} caches of this manifest was made from a prefix of this prompt")
