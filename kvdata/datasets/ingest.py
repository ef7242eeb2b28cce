"""Filling a server through a serving engine: prompts in, caches confirmed, a prefix file that a dataset reads."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvdata.client.connection import Connection
from kvdata.client.context import KVCacheContext
from kvdata.datasets.prefixes import Prefixes, PrefixRecord, Tokenizer, json_lines
from kvdata.datasets.refill import Complete, prefill_through
from kvdata.errors import InvalidRequest, KVCacheSDKError, ServerUnreachable, UnknownPacking

Progress: TypeAlias = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass
class Ingested:
    """What became of each prefix, by its place in the records.

    Attributes:
        stored: computed by the engine and found in the server afterwards.
        present: in the server before; nothing was sent.
        failed: what the engine answered.
        unconfirmed: the engine answered, and the server does not hold the cache.
        short: less than a chunk, which no server stores.
    """

    stored: list[int] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    failed: dict[int, KVCacheSDKError] = field(default_factory=dict)
    unconfirmed: list[int] = field(default_factory=list)
    short: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Every prefix is in the server now."""
        return not (self.failed or self.unconfirmed or self.short)

    def __str__(self) -> str:
        parts = [f"{len(self.stored)} stored", f"{len(self.present)} were there already"]
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        parts += [f"{len(self.unconfirmed)} not found in the server afterwards"] if self.unconfirmed else []
        parts += [f"{len(self.short)} shorter than a chunk"] if self.short else []
        return ", ".join(parts)


def read_prompts(
    paths: Sequence[Path], tokenizer: Callable[[], Tokenizer], window: int | None = None, continuation: int = 0
) -> Prefixes:
    """Prefix records from files.

    A file is a prefix file; or, named ``.jsonl``, one ``{"prompt": text}`` or ``{"text": text}`` per line, whose other
    fields become ``meta``; or else one text.

    Args:
        paths: the files; one prefix file keeps its layout and model name.
        tokenizer: makes the model's tokenizer, when texts ask for one.
        window: cut each text into non-overlapping prefixes of so many tokens; default is one prefix per text.
        continuation: true tokens to keep after each prefix.

    Raises:
        InvalidRequest: a file that is neither, or nothing in them is long enough.
    """
    found: list[PrefixRecord] = []
    described = Prefixes([])
    texts: list[tuple[str, dict[str, Any]]] = []
    for path in paths:
        if is_prefix_file(path):
            described = Prefixes.from_jsonl(path)
            found += described
        elif path.suffix == ".jsonl":
            texts += _texts(path)
        else:
            texts.append((path.read_text(encoding="utf-8"), {"file": path.name}))
    if texts:
        found += _cut(texts, tokenizer(), window, continuation)
    if not found:
        raise InvalidRequest(f"no prefix in {', '.join(map(str, paths))}; is every text shorter than the window?")
    only = len(paths) == 1
    return Prefixes(found, described.layout if only else None, described.model_name if only else None)


def ingest(
    ctx: KVCacheContext,
    records: Sequence[PrefixRecord],
    complete: Complete,
    cache_salt: str = "",
    concurrency: int = 16,
    settle_seconds: float = 20.0,
    progress: Progress | None = None,
) -> Ingested:
    """Have an engine compute what the server does not hold yet, one token per prompt, and look that it arrived.

    Run again after an interruption, it sends only what is still missing. One failing prompt does not stop the others;
    an engine that nobody reaches does.

    Args:
        ctx: of the LMCache server that the engine stores into.
        records: the prefixes.
        complete: asks the engine.
        cache_salt: of records that carry none.
        concurrency: requests at a time.
        settle_seconds: how long to wait for what the engine stores after its answer.
        progress: wraps the iteration over prompts that are sent, as they end.
    """
    if concurrency < 1:
        raise InvalidRequest("concurrency must be at least 1")
    result = Ingested()
    wanted: list[int] = []
    for place, record in enumerate(records):
        if len(record.tokens) < ctx.chunk_size:
            result.short.append(place)
        else:
            (result.present if is_cached(ctx, record, cache_salt) else wanted).append(place)
    unreachable = threading.Event()

    def send(place: int) -> tuple[int, KVCacheSDKError | None]:
        record = records[place]
        if unreachable.is_set():
            return place, ServerUnreachable("not sent: the engine could not be reached")
        try:
            prefill_through(complete, record.tokens.tolist(), record.salt_or(cache_salt))
        except KVCacheSDKError as exc:
            if type(exc) is ServerUnreachable:  # and not a connection that broke, which says nothing of the next
                unreachable.set()
            return place, exc
        return place, None

    sent = []
    with ThreadPoolExecutor(concurrency, thread_name_prefix="kvdata-ingest") as pool:
        try:
            answers: Iterable[tuple[int, KVCacheSDKError | None]] = pool.map(send, wanted)
            for place, error in progress(answers, len(wanted)) if progress else answers:
                if error is None:
                    sent.append(place)
                else:
                    result.failed[place] = error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    deadline = time.monotonic() + settle_seconds
    for place in sent:
        arrived = is_cached(ctx, records[place], cache_salt, deadline - time.monotonic())
        (result.stored if arrived else result.unconfirmed).append(place)
    return result


@contextlib.contextmanager
def lookup_context(connection: Connection) -> Iterator[tuple[KVCacheContext, bool]]:
    """A context that can at least look up, and whether its packing is known.

    A fused cache whose byte order nobody has said is taken for ``fused``: a lookup does not depend on it. Read
    nothing through such a context.
    """
    try:
        ctx, known = connection.connect(), True
    except UnknownPacking:
        ctx, known = replace(connection, packing="fused").connect(), False
    with ctx:
        yield ctx, known


def is_prefix_file(path: Path) -> bool:
    """Whether a file's first line is that of a prefix file."""
    with open(path, encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), "")
    try:
        entry = json.loads(first)
    except ValueError:
        return False
    return isinstance(entry, Mapping) and ("kvdata" in entry or "tokens" in entry)


def is_cached(ctx: KVCacheContext, record: PrefixRecord, cache_salt: str = "", seconds: float = 0.0) -> bool:
    """Whether all whole chunks of a prefix are in the server, now or within `seconds`."""
    return ctx.wait_cached(record.tokens, record.salt_or(cache_salt), seconds) >= ctx.whole_chunks(record.tokens)


def _texts(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Prompts of a JSONL file."""
    found: list[tuple[str, dict[str, Any]]] = []
    for number, entry in json_lines(path):
        named = next((name for name in ("prompt", "text") if isinstance(entry, Mapping) and name in entry), None)
        if named is None or not isinstance(entry[named], str):
            raise InvalidRequest(f"{path}, line {number}: needs 'tokens', or a text as 'prompt' or 'text'")
        found.append((entry[named], {key: value for key, value in entry.items() if key != named}))
    return found


def _cut(
    texts: Sequence[tuple[str, dict[str, Any]]], tokenizer: Tokenizer, window: int | None, continuation: int
) -> Iterator[PrefixRecord]:
    if window is not None:
        metas = [meta for _, meta in texts]
        yield from Prefixes.from_text((text for text, _ in texts), tokenizer, window, continuation, metas)
        return
    for number, (text, meta) in enumerate(texts):
        ids = tokenizer.encode(text, add_special_tokens=False)
        end = len(ids) - continuation
        if end > 0:
            yield PrefixRecord(_ids(ids[:end]), _ids(ids[end:]), None, {"document": number, **meta})


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int64)
