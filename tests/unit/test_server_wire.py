"""The embedded server over its sockets, driven with raw frames (no client code of ours in between)."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
import zmq

from kvdata.server import EmbeddedServer
from kvdata.wire.keys import chunk_hashes, kv_rank
from kvdata.wire.shm import MappedPool

CHUNK = 16
SHAPE = (2, 2, CHUNK, 8)
CHUNK_BYTES = 2 * 2 * CHUNK * 8 * 2
NUMBERS = {
    "lookup": 8, "query": 9, "free": 12, "end": 13, "register": 14, "unregister": 15, "prepare_store": 16,
    "commit_store": 17, "prepare_retrieve": 18, "commit_retrieve": 19, "clear": 20, "chunk_size": 21, "ping": 22,
    "noop": 24,
}  # fmt: skip
SILENCE = "silence"
encode = msgspec.msgpack.encode
fresh = itertools.count()


class Raw:
    """A DEALER that speaks frames. Silence is proven by the answer to a later request."""

    def __init__(self, url: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(url)

    def exchange(self, *frames: bytes) -> list[bytes] | str:
        """The reply to these frames, or `SILENCE`. One thread answers in order, so a probe tells them apart."""
        self.socket.send_multipart(frames)
        probe = uuid.uuid4().bytes
        self.socket.send_multipart([probe, encode(NUMBERS["noop"])])
        replies = []
        while not replies or replies[-1][0] != probe:
            assert self.socket.poll(5000), "the server is dead"
            replies.append(self.socket.recv_multipart())
        assert len(replies) <= 2
        return replies[0] if len(replies) == 2 else SILENCE

    def call(self, operation: str, *arguments: object) -> Any:
        """The decoded result; None for a reply without a result frame."""
        reply = self.exchange(b"u", encode(NUMBERS[operation]), *map(encode, arguments))
        if isinstance(reply, str):
            return reply
        return msgspec.msgpack.decode(reply[2]) if len(reply) == 3 else None

    def lookup(self, tokens: list[int], request: str, **fields: object) -> int:
        assert self.call("lookup", key(tokens, request, worker_id=None, **fields), 1) is None
        hits: int = self.call("query", request)
        return hits

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(tokens: list[int], request: str | None = None, **fields: object) -> dict[str, object]:
    return {
        "model_name": "model", "world_size": 1, "worker_id": 0, "token_ids": tokens, "start": 0, "end": len(tokens),
        "request_id": request or uuid.uuid4().hex, "cache_salt": "", "request_configs": None, "num_kv_readers": 1,
        **fields,
    }  # fmt: skip


def registration(instance: int = 1, **fields: object) -> dict[str, object]:
    return {
        "instance_id": instance, "model_name": "model", "world_size": 1, "block_size": 16, "num_layers": 2,
        "hidden_dim_size": 8, "dtype_str": "bfloat16", "use_mla": False, "num_physical_slots": CHUNK, **fields,
    }  # fmt: skip


def new_tokens(chunks: int) -> list[int]:
    first = 1000 * next(fresh)
    return list(range(first, first + chunks * CHUNK))


def payload(chunks: int) -> bytes:
    return pickle.dumps([torch.full(SHAPE, float(i + 1), dtype=torch.bfloat16) for i in range(chunks)], 4)


def small_server(clock: Clock, name: str = "") -> EmbeddedServer:
    """A server for the tests of a module, to be entered."""
    own = f"kvdata-unit-{os.getpid()}{name}"  # the leak check after each test looks for automatic names
    return EmbeddedServer(chunk_size=CHUNK, pool_bytes=1 << 20, shm_name=own, clock=clock)


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def server(clock: Clock) -> Iterator[EmbeddedServer]:
    with small_server(clock) as running:
        yield running


@pytest.fixture
def raw(server: EmbeddedServer) -> Iterator[Raw]:
    """A client, registered as instance 1 on a server that holds nothing."""
    client = Raw(server.url)
    assert client.call("register", registration()) == {"shm_name": server.shm_name, "pool_size": 1 << 20}
    yield client
    client.call("clear", True)
    for instance in range(10):
        client.call("unregister", instance)
    client.close()


@pytest.fixture
def pickled() -> Iterator[Raw]:
    with EmbeddedServer(chunk_size=CHUNK, pool_bytes=1 << 20, transfer="pickle") as running:
        client = Raw(running.url)
        assert client.call("register", registration()) == {"shm_name": "", "pool_size": 0}
        yield client
        client.close()


def memory(server: EmbeddedServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(server.http_url + "/status").json()["storage_manager"]["l1_manager"]
    return found


def store(raw: Raw, tokens: list[int], **fields: object) -> Any:
    """Prepare and commit without writing anything; the context of the prepare."""
    address = key(tokens, **fields)
    prepared = raw.call("prepare_store", address, 1)
    assert raw.call("commit_store", address, 1, b"") is True
    return prepared["context"]


def delete(server: EmbeddedServer, tokens: list[int], force: bool) -> Any:
    named = {"model_name": "model", "kv_rank": kv_rank(1, 0), "object_group_id": 0, "cache_salt": ""}
    keys = [{"chunk_hash_hex": digest.hex(), **named} for digest in chunk_hashes(tokens, CHUNK)]
    return httpx.request(
        "DELETE", server.http_url + "/cache/objects", json={"tier": "l1", "force": force, "keys": keys}
    ).json()


# --- framing


def test_reply_echoes_uid_and_operation_and_null_has_no_frame(raw):
    for uid in (b"", b"\xff any bytes", encode(-1), encode("x")):
        assert raw.exchange(uid, encode(24)) == [uid, encode(24), encode("OK")]
    assert raw.exchange(b"u", encode(9), encode("unknown id")) == [b"u", encode(9), encode(0)]
    assert raw.exchange(b"u", encode(13), encode("unknown id")) == [b"u", encode(13)]
    assert raw.call("chunk_size") == CHUNK
    assert raw.call("ping", None) is True
    assert raw.call("ping", 1) is True


GARBAGE = [
    [b""],
    [b"only a uid"],
    [b"u", b""],
    [b"u", b"\xc1"],
    [b"u", encode(99)],
    [b"u", encode(-1)],
    [b"u", encode(24.0)],
    [b"u", encode("noop")],
    [b"u", encode([24])],
    [b"u", encode(24) + b"x"],
    [b"u", encode(24), encode(1)],
    [b"u", encode(20)],
    [b"u", encode(13), encode(7)],
    [b"u", encode(22), encode("5")],
    [b"u", encode(8), encode("not a map"), encode(1)],
    [b"u", encode(8), encode({}), encode(1)],
    [b"u", encode(8), b"\xdd\xff\xff\xff\xff", encode(1)],
    [b"u", encode(9), b"\x91" * 100_000],
    [b"u", encode(14), encode({"instance_id": 1})],
    [b"u"] + [b""] * 1000,
]


@pytest.mark.parametrize("frames", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_met_with_silence_and_the_server_lives(raw, frames):
    assert raw.exchange(*frames) == SILENCE


def test_noise_from_several_clients(server):
    def noise() -> None:
        client = Raw(server.url)
        for length in range(40):
            client.socket.send_multipart([os.urandom(length) for _ in range(1 + length % 5)])
        client.socket.send_multipart([b"last", encode(NUMBERS["noop"])])
        while client.socket.recv_multipart()[0] != b"last":
            pass
        client.close()

    threads = [threading.Thread(target=noise) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    client = Raw(server.url)
    assert client.call("noop") == "OK"
    client.close()


TOKENS = list(range(2 * CHUNK))
REFUSED = [
    {"cache_salt": "a/b"},
    {"cache_salt": "x" * 129},
    {"model_name": "a@b"},
    {"num_kv_readers": 0},
    {"token_ids": [-1] * CHUNK, "end": CHUNK},
    {"token_ids": [2**32] * CHUNK, "end": CHUNK},
    {"token_ids": [1.0] * CHUNK, "end": CHUNK},
    {"token_ids": [True] * CHUNK, "end": CHUNK},
    {"end": 100},
    {"start": 5},
    {"end": 3 * CHUNK},
    {"worker_id": None},
    {"request_id": 5},
]


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_invalid_keys_are_met_with_silence(raw, fields):
    for operation in ("prepare_store", "prepare_retrieve"):
        assert raw.call(operation, key(TOKENS, **fields), 1) == SILENCE
    assert raw.call("commit_store", key(TOKENS, **fields), 1, payload(2)) == SILENCE


def test_an_unregistered_instance_is_met_with_silence(raw):
    for operation, more in {"prepare_store": (), "commit_store": (b"",), "prepare_retrieve": ()}.items():
        assert raw.call(operation, key(TOKENS), 99, *more) == SILENCE
    assert raw.call("unregister", 99) is None


@pytest.mark.parametrize(
    "fields",
    [{"dtype_str": "nope"}, {"dtype_str": "Tensor"}, {"num_physical_slots": 0}, {"world_size": 0}, {"num_layers": 0}],
    ids=str,
)
def test_impossible_registrations_are_met_with_silence(raw, fields):
    assert raw.call("register", registration(7, **fields)) == SILENCE


def test_registering_again_changes_nothing(raw):
    raw.call("register", registration(1, hidden_dim_size=64, model_name="other"))
    assert store(raw, new_tokens(1))["slots"][0]["shape"] == list(SHAPE)
    raw.call("register", registration(2, use_mla=True, num_physical_slots=None))
    slots = raw.call("prepare_store", key(new_tokens(1)), 2)["context"]["slots"]
    assert slots[0]["shape"] == [2, CHUNK, 8]


# --- store, lookup, retrieve


def test_store_and_retrieve_through_shared_memory(raw, server):
    tokens, pool = new_tokens(3), MappedPool(server.shm_name, 1 << 20)
    address = key(tokens, "s")
    context = raw.call("prepare_store", address, 1)["context"]
    assert context["chunk_indices"] == [0, 1, 2]
    for i, slot in enumerate(context["slots"]):
        assert slot["offset"] % 4096 == 0
        assert (slot["length"], slot["shape"], slot["dtype"]) == (CHUNK_BYTES, list(SHAPE), "bfloat16")
        pool.view(slot["offset"], slot["length"], torch.bfloat16).fill_(i + 1)
    assert raw.lookup(tokens, "early") == 0  # reserved is not readable
    assert raw.call("commit_store", address, 1, b"") is True
    assert raw.call("commit_store", address, 1, b"") is False
    assert raw.lookup(tokens, "r") == 3
    assert raw.call("query", "r") == 0  # the count is told once
    address = key(tokens, "r", start=CHUNK)
    prepared = raw.call("prepare_retrieve", address, 1)
    assert (prepared["success"], prepared["data"]) == (True, b"")
    read = [pool.view(s["offset"], s["length"], torch.bfloat16)[0].item() for s in prepared["context"]["slots"]]
    assert read == [2, 3]
    assert memory(server)["read_locked_count"] == 3
    assert raw.call("commit_retrieve", address, 1) is True
    assert memory(server)["read_locked_count"] == 1
    assert raw.call("commit_retrieve", address, 1) is True  # harmless
    assert memory(server)["read_locked_count"] == 1
    pool.close()


def test_only_missing_chunks_are_reserved_and_the_first_writer_wins(raw):
    raw.call("register", registration(2))
    short = new_tokens(2)
    store(raw, short)
    longer = short + new_tokens(2)
    first = key(longer, start=CHUNK)
    assert raw.call("prepare_store", first, 1)["context"]["chunk_indices"] == [1, 2]  # from start
    second = key(longer)
    assert raw.call("prepare_store", second, 2)["context"] == {"slots": [], "chunk_indices": []}
    assert raw.call("commit_store", second, 2, b"") is False
    assert raw.call("commit_store", first, 1, b"") is True
    assert raw.lookup(longer, "r") == 4


def test_identity_is_hash_model_rank_and_salt(raw):
    tokens = new_tokens(1)
    store(raw, tokens)
    for fields in ({"cache_salt": "s"}, {"worker_id": 3}, {"model_name": "other"}):
        assert raw.call("prepare_store", key(tokens, **fields), 1)["context"]["chunk_indices"] == [0]


def test_lookup_needs_the_model_registered_and_every_shard(raw):
    tokens = new_tokens(2)
    store(raw, tokens, model_name="late")
    assert raw.lookup(tokens, "a", model_name="late") == 0
    raw.call("register", registration(2, model_name="late"))
    assert raw.lookup(tokens, "b", model_name="late") == 2
    assert raw.lookup(tokens, "c", model_name="late", end=CHUNK + 3) == 1
    raw.call("register", registration(3, world_size=2))
    for rank, hits in ((0, 0), (1, 2)):
        address = key(tokens, world_size=2, worker_id=rank)
        raw.call("prepare_store", address, 3)
        raw.call("commit_store", address, 3, b"")
        assert raw.lookup(tokens, f"w{rank}", world_size=2) == hits


def test_all_or_nothing_when_the_pool_is_short(raw):
    chunks = (1 << 20) // 4096
    assert raw.call("prepare_store", key(list(range(CHUNK * (chunks + 1)))), 1)["context"]["slots"] == []
    assert len(raw.call("prepare_store", key(list(range(CHUNK * chunks))), 1)["context"]["slots"]) == chunks


def test_pickle_transfer(pickled):
    tokens = new_tokens(3)
    assert pickled.call("prepare_store", key(tokens), 1) == {"context": {}}
    assert pickled.call("commit_store", key(tokens), 1, b"") == SILENCE
    assert pickled.call("commit_store", key(tokens), 1, payload(3)) is True
    assert pickled.call("commit_store", key(tokens), 1, payload(3)) is True  # there already
    assert pickled.lookup(tokens, "r") == 3
    address = key(tokens, "r")
    prepared = pickled.call("prepare_retrieve", address, 1)
    assert (prepared["success"], prepared["context"]) == (True, {})
    chunks = pickle.loads(prepared["data"])
    assert [tuple(chunk.shape) for chunk in chunks] == [SHAPE] * 3
    assert [chunk.flatten()[0].item() for chunk in chunks] == [1, 2, 3]
    assert pickled.call("commit_retrieve", address, 1) is True
    assert pickled.call("prepare_retrieve", address, 1)["success"] is False  # the locks went with the pickle


def test_a_pickle_may_be_committed_to_a_shared_pool_too(raw, server):
    tokens = new_tokens(2)
    assert raw.call("commit_store", key(tokens), 1, payload(2)) is True
    assert raw.lookup(tokens, "r") == 2
    slot = raw.call("prepare_retrieve", key(tokens, "r"), 1)["context"]["slots"][1]
    pool = MappedPool(server.shm_name, 1 << 20)
    assert pool.view(slot["offset"], slot["length"], torch.bfloat16).tolist() == [2.0] * (CHUNK_BYTES // 2)
    pool.close()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_a_hostile_pickle_is_silent_and_harmless(raw, server, tmp_path):
    good = torch.zeros(SHAPE, dtype=torch.bfloat16)
    bad: list[object] = [
        [Bomb(tmp_path / "x")],
        [good, Bomb(tmp_path / "x")],
        [good.float()],
        [good, good],
        [],
        "text",
    ]
    for item in [*(pickle.dumps(b, 4) for b in bad), b"garbage", b"\x80\x04."]:
        assert raw.call("commit_store", key(new_tokens(1)), 1, item) == SILENCE
    other_shape = pickle.dumps([good.view(2, 2, 8, CHUNK)], 4)
    assert raw.call("commit_store", key(new_tokens(1)), 1, other_shape) is False
    assert list(tmp_path.iterdir()) == []
    assert memory(server)["total_object_count"] == 0


# --- locks and their end


def test_a_failed_retrieve_costs_one_lock_on_each_locked_chunk(raw, server):
    tokens = new_tokens(2)
    store(raw, tokens)
    assert raw.lookup(tokens, "r", num_kv_readers=2) == 2
    assert raw.call("prepare_retrieve", key(tokens + new_tokens(1), "r"), 1) == {
        "success": False, "data": b"", "context": {},
    }  # fmt: skip
    assert memory(server)["read_locked_count"] == 2
    assert raw.call("prepare_retrieve", key(tokens + new_tokens(1), "r"), 1)["success"] is False
    assert memory(server)["read_locked_count"] == 0
    assert raw.call("prepare_retrieve", key(tokens, "r"), 1)["success"] is False


def test_free_lookup_locks_releases_the_part_named(raw, server):
    tokens = new_tokens(4)
    store(raw, tokens)
    assert raw.lookup(tokens, "r") == 4
    for start, end, left in ((1, 2 * CHUNK - 1, 4), (CHUNK, 2 * CHUNK, 3), (0, 10**6, 0)):
        raw.call("free", key(tokens, "r", worker_id=None, start=start, end=end), 1)
        assert memory(server)["read_locked_count"] == left
    assert raw.lookup(tokens, "other") == 4
    raw.call("free", key(tokens, "never looked up", worker_id=None), 1)
    assert raw.call("end", "other") is None  # does not release
    assert memory(server)["read_locked_count"] == 4


def test_read_locks_expire_together_and_a_new_one_renews_them(raw, server, clock):
    tokens = new_tokens(1)
    store(raw, tokens)
    assert raw.lookup(tokens, "a") == 1
    clock.now += 299
    assert raw.lookup(tokens, "b") == 1
    clock.now += 299
    assert memory(server)["read_locked_count"] == 1
    clock.now += 2
    assert memory(server)["read_locked_count"] == 0
    assert raw.call("prepare_retrieve", key(tokens, "a"), 1)["success"] is False


def test_an_expired_reservation_is_handed_on_and_never_published(raw, clock):
    tokens = new_tokens(2)
    late, other = key(tokens), key(tokens, token_ids=[*tokens, 1])
    raw.call("prepare_store", late, 1)
    clock.now += 601
    assert raw.call("prepare_store", other, 1)["context"]["chunk_indices"] == [0, 1]
    assert raw.call("commit_store", late, 1, b"") is True  # as the real server answers
    assert raw.lookup(tokens, "r") == 0
    assert raw.call("commit_store", other, 1, b"") is True
    assert raw.lookup(tokens, "s") == 2


def test_unregistering_discards_what_was_not_committed(raw, server):
    tokens = new_tokens(2)
    raw.call("register", registration(2))
    raw.call("prepare_store", key(tokens), 2)
    raw.call("unregister", 2)
    assert memory(server)["memory_used_bytes"] == 0
    assert raw.call("prepare_store", key(tokens), 1)["context"]["chunk_indices"] == [0, 1]


def test_unregistering_releases_what_was_being_read(raw, server):
    tokens = new_tokens(2)
    raw.call("register", registration(2))
    store(raw, tokens)
    assert raw.lookup(tokens, "r") == 2
    raw.call("prepare_retrieve", key(tokens, "r"), 2)
    raw.call("unregister", 2)
    assert memory(server)["read_locked_count"] == 0


def test_delete_aborts_a_reservation_and_respects_locks(raw, server):
    tokens = new_tokens(2)
    address = key(tokens)
    raw.call("prepare_store", address, 1)
    assert delete(server, tokens, force=False) == {"deleted": 0, "skipped": 2, "ok": True}
    assert delete(server, tokens, force=True) == {"deleted": 2, "skipped": 0, "ok": True}
    raw.call("commit_store", address, 1, b"")
    assert memory(server)["total_object_count"] == 0
    store(raw, tokens)
    assert raw.lookup(tokens[:CHUNK], "r") == 1
    assert delete(server, tokens, force=False) == {"deleted": 1, "skipped": 1, "ok": True}
    assert delete(server, tokens, force=True) == {"deleted": 1, "skipped": 0, "ok": True}


def test_clear_keeps_what_is_locked_unless_forced(raw, server):
    tokens = new_tokens(3)
    store(raw, tokens)
    raw.lookup(tokens[:CHUNK], "r")
    raw.call("prepare_store", key(new_tokens(1)), 1)
    assert raw.call("clear", False) is None
    assert memory(server)["total_object_count"] == 2
    cleared = httpx.post(server.http_url + "/cache/clear", json={"tier": "l1", "force": True})
    assert cleared.json() == {"status": "ok", "cleared": {"tier": "l1"}}
    assert memory(server)["total_object_count"] == memory(server)["memory_used_bytes"] == 0
