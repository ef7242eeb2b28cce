"""A server that answers, and lies: each number it sends is compared with the layout before memory is touched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise

import httpx
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdata import Connection, KVCacheContext
from kvdata.client.transfer import _map_slots
from kvdata.errors import PoolNotMappable, ProtocolError, UnsafePayload
from kvdata.server import EmbeddedServer
from kvdata.wire.messages import PreparedRetrieve, PreparedStore, Registered, RetrieveContext, Slot, StoreContext
from kvdata.wire.shm import POOL_PREFIX, SHM_FOLDER
from tests.unit import hostile
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv

CHUNK, CHUNKS, POOL = 32, 3, 16 << 20
LENGTH = CHUNK * LAYOUT.token_bytes
Slots = list[Slot]
changed = msgspec.structs.replace

LIES: dict[str, Callable[[Slots], Slots]] = {
    "beyond the pool": lambda s: [*s[:2], changed(s[2], offset=POOL)],
    "across its end": lambda s: [*s[:2], changed(s[2], offset=POOL - LENGTH + 4096)],
    "before the pool": lambda s: [*s[:2], changed(s[2], offset=-4096)],
    "at 2**62": lambda s: [*s[:2], changed(s[2], offset=2**62)],
    "at 2**64 - 4096": lambda s: [*s[:2], changed(s[2], offset=2**64 - 4096)],
    "off by one byte": lambda s: [*s[:2], changed(s[2], offset=s[2].offset + 1)],
    "one twice": lambda s: [s[0], s[1], s[0]],
    "one half in another": lambda s: [s[0], s[1], changed(s[0], offset=s[0].offset + LENGTH // 2)],
    "one too few": lambda s: s[:2],
    "one too many": lambda s: [*s, changed(s[2], offset=1 << 20)],
    "none": lambda s: [],
    "a hundred thousand": lambda s: s[:1] * 100_000,
    "longer": lambda s: [*s[:2], changed(s[2], length=LENGTH + 4096)],
    "shorter": lambda s: [*s[:2], changed(s[2], length=LENGTH - 2)],
    "empty": lambda s: [changed(slot, length=0) for slot in s],
    "of negative length": lambda s: [*s[:2], changed(s[2], length=-LENGTH)],
    "of 2**63 - 1 bytes": lambda s: [*s[:2], changed(s[2], length=2**63 - 1)],
    "of float32": lambda s: [changed(slot, dtype="float32") for slot in s],
    "of float16": lambda s: [*s[:2], changed(s[2], dtype="float16")],
    "of no dtype": lambda s: [*s[:2], changed(s[2], dtype="x" * 1000)],
}


@pytest.fixture
def locks(embedded: EmbeddedServer) -> Callable[[], tuple[int, int]]:
    """Chunks that are read-locked and reserved."""

    def count() -> tuple[int, int]:
        held = httpx.get(embedded.http_url + "/status").json()["storage_manager"]["l1_manager"]
        return held["read_locked_count"], held["write_locked_count"]

    return count


def check_works(ctx: KVCacheContext) -> None:
    tokens, kv = fresh_tokens(CHUNKS * CHUNK), random_kv(CHUNKS * CHUNK)
    assert ctx.store(kv, tokens) is True
    assert torch.equal(ctx.retrieve(tokens), kv)


@pytest.mark.parametrize("change", LIES.values(), ids=LIES)
def test_slots_to_read(ctx, lie, locks, change, monkeypatch):
    tokens, kv = fresh_tokens(CHUNKS * CHUNK), random_kv(CHUNKS * CHUNK)
    ctx.store(kv, tokens)
    lie("prepare_retrieve", lambda r: PreparedRetrieve(True, b"", RetrieveContext(change(r.context.slots))))
    with pytest.raises(ProtocolError, match="slot") as caught:
        ctx.retrieve(tokens)
    assert len(str(caught.value)) < 400
    monkeypatch.undo()
    assert torch.equal(ctx.retrieve(tokens), kv)
    assert locks() == (0, 0)


INDICES: dict[str, Callable[[list[int]], list[int]]] = {
    "twice the same": lambda i: [0, 0, 1],
    "one too few": lambda i: i[:2],
    "one too many": lambda i: [*i, 0],
    "none": lambda i: [],
    "beyond the end": lambda i: [0, 1, CHUNKS],
    "negative": lambda i: [0, 1, -1],
    "at 2**62": lambda i: [0, 1, 2**62],
}


@pytest.mark.parametrize("slots", [change for name, change in LIES.items() if name != "none"], ids=lambda _: "")
def test_slots_to_write(ctx, embedded, lie, locks, slots, monkeypatch):
    check_refused_store(ctx, embedded, lie, monkeypatch, lambda s, i: StoreContext(slots(s), i))
    assert locks() == (0, 0)


@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
def test_chunk_numbers_to_write(ctx, embedded, lie, locks, indices, monkeypatch):
    check_refused_store(ctx, embedded, lie, monkeypatch, lambda s, i: StoreContext(s, indices(i)))
    ctx.close()  # what could not be aborted is not published by un-registering either


def check_refused_store(ctx, embedded, lie, monkeypatch, change) -> None:
    """Refused, nothing of it readable, and not a byte of the pool written."""
    tokens = fresh_tokens(CHUNKS * CHUNK)
    pool = SHM_FOLDER / embedded.shm_name
    before = pool.read_bytes()
    lie("prepare_store", lambda r: PreparedStore(change(r.context.slots, r.context.chunk_indices)))
    with pytest.raises(ProtocolError, match="slot"):
        ctx.store(random_kv(CHUNKS * CHUNK), tokens)
    monkeypatch.undo()
    assert pool.read_bytes() == before
    assert ctx.lookup(tokens) == 0
    check_works(ctx)


@pytest.mark.parametrize("count", [-1, CHUNKS + 1, 2**62, -(2**63), 2**64 - 1])
def test_hits(ctx, lie, locks, count, monkeypatch):
    lie("query_prefetch_status", lambda _: count)
    for operation in (ctx.lookup, ctx.retrieve):
        with pytest.raises(ProtocolError, match="lookup of 3 chunks"):
            operation(fresh_tokens(CHUNKS * CHUNK))
    monkeypatch.undo()
    check_works(ctx)
    assert locks() == (0, 0)


POOLS = {
    "a path": ("../../etc/passwd", POOL),
    "another program's memory": ("torch_1_2", POOL),
    "a name of a thousand letters": (POOL_PREFIX + "x" * 1000, POOL),
    "one that is not there": (POOL_PREFIX + "nobody", POOL),
    "a larger one": (None, POOL + (1 << 30)),
    "an endless one": (None, 2**63 - 1),
    "a negative one": (None, -4096),
}


@pytest.mark.parametrize(("name", "size"), POOLS.values(), ids=POOLS)
def test_pools(connection, embedded, lie, locks, name, size, monkeypatch):
    lie("register", lambda r: Registered(r.shm_name if name is None else name, size))
    with pytest.raises(PoolNotMappable, match="cannot be opened") as caught:
        connection.connect()
    assert len(str(caught.value)) < 500
    monkeypatch.undo()
    with connection.connect() as ctx:
        check_works(ctx)


def test_a_link_in_the_place_of_a_pool_is_not_followed(connection, lie, tmp_path, monkeypatch):
    link, target = SHM_FOLDER / f"{POOL_PREFIX}kvdata-lie-{os.getpid()}", tmp_path / "precious"
    target.write_bytes(bytes(POOL))
    link.symlink_to(target)
    try:
        lie("register", lambda _: Registered(link.name, POOL))
        with pytest.raises(PoolNotMappable):
            connection.connect()
    finally:
        link.unlink()


@given(st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_slots_are_mapped_lie_in_the_pool_and_apart(ctx, data):
    numbers = st.one_of(
        st.integers(-(2**63), 2**64 - 1),
        st.sampled_from([0, LENGTH, POOL - LENGTH, POOL]),
        st.integers(0, POOL // 4096).map(lambda page: page * 4096),
    )
    length = st.one_of(st.just(LENGTH), numbers)
    dtype = st.sampled_from(["bfloat16", "uint8", "float16", "", "torch.bfloat16"])
    slots = data.draw(st.lists(st.builds(Slot, numbers, length, st.just([]), dtype), max_size=4))
    session = ctx._sessions.current()
    try:
        views = _map_slots(session, slots)
    except ProtocolError:
        return
    start = session.pool.view(0, POOL, torch.uint8).data_ptr()
    spans = sorted((view.data_ptr() - start, view.data_ptr() - start + view.nbytes) for view in views)
    assert all(begin >= 0 and end <= POOL and end - begin == LENGTH for begin, end in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


@pytest.fixture(scope="module")
def pickling() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(chunk_size=CHUNK, pool_bytes=1 << 20, transfer="pickle") as server:
        yield server


def test_pickles(pickling, lie, monkeypatch):
    """The same corpus as `test_hostile_pickles`, through a whole retrieve."""
    connection = Connection(pickling.url, pickling.http_url, "unit/model", 30.0, LAYOUT)
    with connection.connect() as ctx:
        tokens, kv = fresh_tokens(CHUNK), random_kv(CHUNK)
        ctx.store(kv, tokens)
        hostile.tripped.clear()
        answers = iter(hostile.CORPUS.values())
        lie("prepare_retrieve", lambda r: {**r, "data": next(answers)})
        for _ in hostile.CORPUS:
            with pytest.raises(UnsafePayload):
                ctx.retrieve(tokens)
        monkeypatch.undo()
        assert not hostile.tripped
        assert torch.equal(ctx.retrieve(tokens), kv)
