"""Errors, logs and reprs tell what happened to a prompt, and nothing of what is in it."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import pkgutil
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

import kvdata
from kvdata import Connection, KVCacheContext, KVCacheDataset, KVLayout
from kvdata.cli import app
from kvdata.client.transfer import check_pool
from kvdata.datasets.chains import Chains
from kvdata.datasets.manifest import Manifest, Written
from kvdata.datasets.prefixes import Prefixes
from kvdata.datasets.refill import Refill
from kvdata.engines.openai import openai_completion
from kvdata.errors import KVCacheSDKError, LeaseLost
from kvdata.lightning.cache_store import CacheStore
from kvdata.lightning.cache_write import CacheWrite, WriteCounts
from kvdata.models.cartridge import Cartridge
from kvdata.server import EmbeddedServer
from kvdata.server.service import Service
from kvdata.wire import tensors
from kvdata.wire.messages import CacheKey, Key, KVEvent, KVEventBatch, PreparedRetrieve, Registered, RetrieveContext
from tests.unit.conftest import LAYOUT, random_kv

CHUNK = 32
FIRST = 918_270_000  # no other number begins like these
VALUE = 0.7171  # in every element of the caches; 0.7188 in bfloat16
SECRET = re.compile(r"91827\d|0\.71[78]")
Change = Callable[[str, Callable[[Any], Any]], None]

_chunks = iter(range(1000))


def prompt(chunks: int = 2) -> list[int]:
    start = FIRST + CHUNK * next(_chunks)
    return list(range(start, start + CHUNK * chunks))


def cache(tokens: int = 2 * CHUNK) -> torch.Tensor:
    return torch.full((2, LAYOUT.num_layers, tokens, LAYOUT.hidden), VALUE, dtype=LAYOUT.dtype)


@pytest.fixture
def small() -> Iterator[Connection]:
    """A server of 40 chunks."""
    with EmbeddedServer(chunk_size=CHUNK, pool_bytes=40 * CHUNK * LAYOUT.token_bytes) as server:
        yield Connection(server.url, server.http_url, "unit/model", 20.0, LAYOUT)


def in_folder(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def engine_that_answers(status: int, text: str, kind: str = "application/json") -> None:
    """Ask one for a completion."""
    answer = httpx.MockTransport(lambda _: httpx.Response(status, text=text, headers={"content-type": kind}))
    complete = openai_completion("http://engine", "m", transport=answer, attempts=1)
    list(complete(prompt(), {"max_tokens": 1}, ""))


ECHO = f"[{{'loc': ('body', 'prompt'), 'input': {prompt()}}}]"
LINE = f'{{"tokens": {prompt()}, '


class Provocation:
    """Each method makes kvdata raise the error that it is named after, in every way that knows of a prompt."""

    def __init__(self, ctx: KVCacheContext, small: Connection, lie: Change, folder: Path) -> None:
        self.ctx, self.small, self.lie, self.folder = ctx, small, lie, folder

    def InvalidRequest(self) -> Iterator[Callable[[], object]]:
        yield lambda: self.ctx.lookup([*prompt(), 2**32 + FIRST])
        yield lambda: self.ctx.lookup([*prompt(), -FIRST])
        yield lambda: self.ctx.lookup([*prompt(), float(FIRST)])
        yield lambda: self.ctx.lookup([prompt(), prompt(1)])
        yield lambda: self.ctx.lookup([*prompt(), str(FIRST)])
        yield lambda: self.ctx.lookup_many([prompt()], ["a", "b"])
        yield lambda: self.ctx.store(cache(4), prompt()[:4])
        for text in ("x", '"salt": 5}', '"continuation": [1.5]}', '"more": 1}', '"meta": 5}', '"salt": "@"}'):
            file = in_folder(self.folder, "prefixes.jsonl", LINE + text)
            yield lambda file=file: Prefixes.from_jsonl(file)
            yield lambda file=file: Manifest.load(file)
        yield lambda: engine_that_answers(400, f'{{"message": "{ECHO}"}}')
        yield lambda: engine_that_answers(422, ECHO)

    def GeometryMismatch(self) -> Iterator[Callable[[], object]]:
        yield lambda: self.ctx.store(cache().float(), prompt())
        yield lambda: self.ctx.store(cache()[:, :1], prompt())
        yield lambda: self.ctx.store(cache(), prompt(1))
        self.ctx.store(cache(), tokens := prompt())
        yield lambda: self.ctx.retrieve(tokens, out=cache()[:1])
        yield lambda: LAYOUT.view(cache().flatten()[:-1])

    def OtherSource(self) -> Iterator[Callable[[], object]]:
        cartridge = Cartridge(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, CHUNK)
        cartridge.begin(cache(CHUNK).float(), prompt())
        yield lambda: cartridge.check(prompt())

    def UnsupportedLayout(self) -> Iterator[Callable[[], object]]:
        fused = KVLayout(3, 2, 16, packing="vllm-cpu", block_size=64)  # blocks of two chunks
        yield lambda: dataclasses.replace(self.small, layout=fused).connect()

    def ModelNotRegistered(self) -> Iterator[Callable[[], object]]:
        unknown = dataclasses.replace(self.small, model_name="nobody/knows", layout=None)
        yield lambda: KVCacheContext(unknown).retrieve(prompt())

    def MissingKV(self) -> Iterator[Callable[[], object]]:
        yield lambda: KVCacheDataset([prompt()], connection=self.small)[0]
        line = Written("d", 9, prompt(), "s", "p", "r1", 1)
        yield lambda: Manifest([line]).request_for(prompt())

    def GoneAgain(self) -> Iterator[Callable[[], object]]:
        refill = Refill(lambda *_: [], settle_seconds=0.0)
        data = KVCacheDataset([prompt()], connection=self.small, on_missing="refill", refill=refill)
        data.refill = lambda *_: None  # it was there, and is gone before it is read
        yield lambda: data[0]

    def ServerUnreachable(self) -> Iterator[Callable[[], object]]:
        nowhere = dataclasses.replace(self.small, url="tcp://127.0.0.1:1", http_url="http://127.0.0.1:1")
        yield lambda: KVCacheContext(nowhere).lookup(prompt())

    def ServerTimeout(self) -> Iterator[Callable[[], object]]:
        impatient = dataclasses.replace(self.small, timeout=1.0)
        self.lie("prepare_retrieve", lambda _: {"success": False, "data": b"", "context": {}})
        self.ctx.store(cache(), going := prompt())
        yield lambda: self.ctx.retrieve(going)  # what vanishes again and again
        self.lie("prepare_retrieve", lambda _: 1 / 0)
        with impatient.connect() as ctx:
            ctx.store(cache(), tokens := prompt())
            yield lambda: ctx.retrieve(tokens)

    def ConnectionLost(self) -> Iterator[Callable[[], object]]:
        with self.small.connect() as ctx:
            ctx.store(cache(), tokens := prompt())
            session = ctx._sessions.current()
            with suppress(LeaseLost), ctx.lease(tokens):
                yield lambda: (session.pool.path.unlink(), check_pool(session, "retrieve"))

    def LeaseLost(self) -> Iterator[Callable[[], object]]:
        self.ctx.store(cache(), tokens := prompt())

        def use() -> None:
            with self.ctx.lease(tokens):
                self.lie("prepare_retrieve", lambda _: {"success": False, "data": b"", "context": {}})

        yield use

    def UnsupportedServer(self) -> Iterator[Callable[[], object]]:
        self.lie("register", lambda _: 1 / 0)
        yield lambda: dataclasses.replace(self.small, timeout=1.0).connect().store(cache(), prompt())

    def PoolNotMappable(self) -> Iterator[Callable[[], object]]:
        self.lie("register", lambda _: Registered("lmcache_l1_pool_nobody", 4096))
        yield lambda: KVCacheContext(self.small).store(cache(), prompt())

    def ProtocolError(self) -> Iterator[Callable[[], object]]:
        self.ctx.store(cache(), tokens := prompt())
        self.lie("prepare_retrieve", lambda r: PreparedRetrieve(True, b"", RetrieveContext(r.context.slots * 2)))
        yield lambda: self.ctx.retrieve(tokens)
        self.lie("query_prefetch_status", lambda _: prompt())
        yield lambda: self.ctx.lookup(prompt())
        event = KVEvent(1, "stored", "m", [bytes(32)], None, [*prompt(), 2**32 + FIRST])
        yield lambda: Chains(1.0, 9).add(KVEventBatch(True, 1, 1, False, [event]), 0.0)
        yield lambda: engine_that_answers(200, f"data: {prompt()}\n\n", "text/event-stream")
        yield lambda: engine_that_answers(200, f"data: {prompt()} x\n\n", "text/event-stream")

    def ServerError(self) -> Iterator[Callable[[], object]]:
        yield lambda: engine_that_answers(500, ECHO)
        yield lambda: engine_that_answers(200, f'data: {{"error": "{ECHO}"}}\n\n', "text/event-stream")

    def UnsafePayload(self) -> Iterator[Callable[[], object]]:
        kv = cache().flatten()
        yield lambda: tensors.loads(tensors.dumps([kv[:-1]]), LAYOUT.dtype, kv.numel(), 1)
        yield lambda: tensors.loads(tensors.dumps([kv.float()]), LAYOUT.dtype, kv.numel(), 1)
        yield lambda: tensors.loads(tensors.dumps([torch.tensor(prompt())]), torch.int64, 2 * CHUNK + 1, 1)
        yield lambda: tensors.loads(b"\x80\x04]" + tensors.dumps([kv])[2:-9] + b"a.", LAYOUT.dtype, kv.numel(), 1)

    def StoreFailed(self) -> Iterator[Callable[[], object]]:
        self.lie("commit_store", lambda _: False)
        yield lambda: self.ctx.store(cache(), prompt())
        store = CacheStore(self.ctx, None, WriteCounts(), 1)
        yield lambda: store.verify((tuple(prompt()), "salt"), b"digest")

    def PoolFull(self) -> Iterator[Callable[[], object]]:
        with self.small.connect() as ctx:
            yield lambda: ctx.store(cache(50 * CHUNK), prompt(50))

    def StoreConflict(self) -> Iterator[Callable[[], object]]:
        store = CacheStore(self.ctx, None, WriteCounts(), 0)
        source = prompt(3)
        store.store(CacheWrite(cache(), source, "p"))
        yield lambda: store.store(CacheWrite(random_kv(2 * CHUNK), source, "p"))

    def CacheLocked(self) -> Iterator[Callable[[], object]]:
        self.ctx.store(cache(), tokens := prompt())
        with self.ctx.lease(tokens):
            yield lambda: self.ctx.delete(tokens)


# About folders and settings, where no prompt is near, or never seen outside.
ELSEWHERE = {
    "KVCacheSDKError",
    "UnknownPacking",
    "SnapshotError", "OtherSnapshot", "SnapshotIncomplete", "SnapshotDamaged", "UnsupportedSnapshot", "DiskFull",
    "OtherEvaluation", "Vanished",
}  # fmt: skip


def errors(root: type[Exception] = KVCacheSDKError) -> Iterator[str]:
    yield root.__name__
    for child in root.__subclasses__():
        yield from errors(child)


def test_every_error_is_provoked_or_has_no_prompt():
    assert set(errors()) == ELSEWHERE | {name for name in vars(Provocation) if name[0].isupper()}


@pytest.mark.parametrize("error", sorted(set(errors()) - ELSEWHERE))
def test_no_error_and_no_log_tells_tokens_or_values(error, ctx, small, lie, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("kvdata.client.storing._FULL_POOL_SECONDS", 0.1)
    provocation = Provocation(ctx, small, lie, tmp_path)
    with caplog.at_level(logging.DEBUG, "kvdata"):
        count = 0
        for provoke in getattr(provocation, error)():
            with pytest.raises(KVCacheSDKError) as caught:
                provoke()
            assert type(caught.value).__name__ in (error, "Vanished")
            count += 1
            said = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + str(caught.value.args)
            assert not SECRET.search(said)
            monkeypatch.undo()
    assert count
    assert not SECRET.search(caplog.text)


# --- reprs


def modules() -> Iterator[Any]:
    for module in pkgutil.walk_packages(kvdata.__path__, "kvdata."):
        if not module.name.endswith("__main__"):
            yield importlib.import_module(module.name)


CONTENT = {
    "tokens", "token_ids", "ids", "source_tokens", "continuation", "continuations", "question", "answer", "texts",
    "data", "encoded",
}  # fmt: skip
# Places and lengths; a model's frequencies; and what an engine hands to its caller, token by token.
SHOWN = {
    *(("KVBatch", name) for name in ("mask", "lengths", "start", "index", "continuation_mask")),
    ("Rope", "inv_freq"),
    ("TokenEvent", "token_id"),
}


def told(cls: type) -> Iterator[str]:
    """Fields of a dataclass whose content its repr would show."""
    for field in dataclasses.fields(cls):
        kind = str(field.type)
        holds_tensors = re.search(r"Tensor|ndarray", kind) and "Callable" not in kind
        private = holds_tensors or (field.name in CONTENT and kind not in ("int", "float"))
        if field.repr and private and (cls.__name__, field.name) not in SHOWN:
            yield f"{cls.__name__}.{field.name}: {kind}"


def test_no_dataclass_shows_tensors_or_tokens():
    members = {cls for module in modules() for cls in vars(module).values() if isinstance(cls, type)}
    mine = [cls for cls in members if dataclasses.is_dataclass(cls) and cls.__module__.startswith("kvdata")]
    assert len(mine) > 40
    assert not [field for cls in mine for field in told(cls)]


def test_no_message_shows_tensors_or_tokens():
    tokens = prompt()
    messages = [
        CacheKey("m", 1, 0, tokens, 0, 64, "r"),
        Key("m", 1, 0, msgspec.Raw(msgspec.msgpack.encode(tokens)), 0, 64, "r"),
        KVEventBatch(True, 1, 2, False, [KVEvent(1, "stored", "m", [b""], None, tokens)]),
        PreparedRetrieve(True, tensors.dumps([cache()]), RetrieveContext([])),
    ]
    assert not [m for m in messages if SECRET.search(repr(m)) or "storage" in repr(m)]
    assert repr(messages[0]).startswith("Key(model_name='m', world_size=1, worker_id=0, token_ids=<list>, start=0, ")


def test_a_crash_of_the_command_shows_no_variables():
    assert app.pretty_exceptions_show_locals is False


def test_the_service_hides_its_transfers():
    """They are named by the token ids of their keys."""
    assert not [f.name for f in dataclasses.fields(Service) if f.name in ("_stores", "_reads") and f.repr]
