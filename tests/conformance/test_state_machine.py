"""Any interleaving of operations by two clients agrees with a model of the cache, in a few dozen lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvdata import Connection, KVCacheContext
from kvdata.errors import CacheLocked
from tests.conformance.conftest import LAYOUT, MODEL, check_clean, fresh_tokens, random_kv
from tests.servers import Server

SECONDS = 30.0  # within which a server does what it does by itself
JUNK_BYTES = 0.83  # of the pool: above the watermark of 0.8 at which servers evict

# A prompt is a word: each letter is a chunk, so that prompts share beginnings.
WORDS = st.text("ab", min_size=1, max_size=3)
SALTS = st.sampled_from(["", "tenant"])
CLIENTS = st.integers(0, 1)
Chunk = tuple[str, str]  # salt and word: the chunk at the word's end


@dataclass
class OpenLease:
    """What a client is looking at, and what it should be."""

    stack: ExitStack
    views: list[torch.Tensor]
    expected: torch.Tensor | None
    chunks: list[Chunk]


class Cache(RuleBasedStateMachine):
    """Operations on a server, and a dict that says what each has to answer.

    Args:
        server: whose cache may be cleared.
        clients: two, which all examples share.
        evicts: it is small and nobody else's: fill it up, too.
    """

    def __init__(self, server: Server, clients: Sequence[KVCacheContext], evicts: bool) -> None:
        super().__init__()
        self.server, self.clients = server, clients
        self.http = httpx.Client(base_url=server.http_url, timeout=SECONDS, trust_env=False, verify=False)
        self.size = server.chunk_size
        first = fresh_tokens(16 * self.size)
        self.letters = {"a": first[: self.size], "b": first[self.size : 2 * self.size], "x": first[2 * self.size :][:5]}
        self.held: dict[Chunk, torch.Tensor] = {}
        self.leases: list[OpenLease] = []
        self.evictions_left = int(evicts)

    # --- the model

    def tokens(self, word: str) -> list[int]:
        return [token for letter in word for token in self.letters[letter]]

    def hit(self, word: str, salt: str) -> int:
        """Leading chunks that are there."""
        present = [(salt, word[: end + 1]) in self.held for end in range(len(word))]
        return next((end for end, found in enumerate(present) if not found), len(word))

    def kv(self, word: str, salt: str) -> torch.Tensor | None:
        """What a retrieve has to give."""
        parts = [self.held[salt, word[: end + 1]] for end in range(self.hit(word, salt))]
        return torch.cat(parts, dim=2) if parts else None

    def locked(self) -> set[Chunk]:
        shm = self.server.transfer == "shm"  # pickles are copies
        return {chunk for lease in self.leases for chunk in lease.chunks if shm}

    def settled(self) -> None:
        """Wait until the server has read what the clients gave back: they do not wait for that."""
        self.wait(lambda: self.memory()["read_locked_count"] == len(self.locked()))

    def memory(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/status").json()["storage_manager"]["l1_manager"]
        return found

    def wait(self, reached) -> None:
        deadline = time.monotonic() + SECONDS
        while not reached():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    # --- the operations

    @rule(client=CLIENTS, word=WORDS, salt=SALTS, rest=st.sampled_from(["", "x"]))
    def store(self, client: int, word: str, salt: str, rest: str) -> None:
        """The first writer's chunks stay, whoever comes later; what does not fill a chunk is not stored."""
        tokens = self.tokens(word + rest)
        kv = random_kv(len(tokens))
        missing = [end for end in range(len(word)) if (salt, word[: end + 1]) not in self.held]
        assert self.clients[client].store(kv, tokens, salt) is bool(missing)
        for end in missing:
            self.held[salt, word[: end + 1]] = kv[:, :, end * self.size : (end + 1) * self.size].clone()

    @rule(client=CLIENTS, word=WORDS, salt=SALTS, rest=st.sampled_from(["", "x"]))
    def lookup(self, client: int, word: str, salt: str, rest: str) -> None:
        assert self.clients[client].lookup(self.tokens(word + rest), salt) == self.hit(word, salt) * self.size

    @rule(client=CLIENTS, words=st.lists(WORDS, max_size=3), salt=SALTS)
    def retrieve(self, client: int, words: list[str], salt: str) -> None:
        found = self.clients[client].retrieve_many([self.tokens(word) for word in words], salt)
        for word, kv in zip(words, found, strict=True):
            assert same(kv, self.kv(word, salt))

    @precondition(lambda self: len(self.leases) < 3)
    @rule(client=CLIENTS, word=WORDS, salt=SALTS)
    def lease(self, client: int, word: str, salt: str) -> None:
        stack = ExitStack()
        views = stack.enter_context(self.clients[client].lease(self.tokens(word), salt))
        chunks = [(salt, word[: end + 1]) for end in range(self.hit(word, salt))]
        self.leases.append(OpenLease(stack, views, self.kv(word, salt), chunks))

    @precondition(lambda self: self.leases)
    @rule(place=st.integers(0, 2))
    def end_lease(self, place: int) -> None:
        lease = self.leases.pop(place % len(self.leases))
        lease.stack.close()

    @precondition(lambda self: self.server.release >= (0, 5, 2))
    @rule(client=CLIENTS, word=WORDS, salt=SALTS)
    def delete(self, client: int, word: str, salt: str) -> None:
        """What is leased stays, and the rest goes."""
        self.settled()
        named = {(salt, word[: end + 1]) for end in range(len(word))} & self.held.keys()
        kept = named & self.locked()
        if kept:
            with pytest.raises(CacheLocked, match=f"^{len(kept)} chunks"):
                self.clients[client].delete(self.tokens(word), salt)
        else:
            assert self.clients[client].delete(self.tokens(word), salt) == len(named)
        for chunk in named - kept:
            del self.held[chunk]

    @precondition(
        lambda self: self.server.release >= (0, 5, 6) or not self.locked()
    )  # before, it takes locked ones too
    @rule()
    def clear(self) -> None:
        self.settled()
        path = "/cache/clear" if self.server.release >= (0, 5, 1) else "/clear-cache"
        assert self.http.post(path).status_code == 200
        self.held = {chunk: kv for chunk, kv in self.held.items() if chunk in self.locked()}

    @precondition(lambda self: self.evictions_left and self.held)
    @rule(client=CLIENTS)
    def evict(self, client: int) -> None:
        """Somebody fills the pool: prompts get shorter or vanish, none gets wrong, and none that is leased."""
        self.settled()
        self.evictions_left -= 1
        memory = self.memory()
        chunks = int(memory["memory_total_bytes"] * JUNK_BYTES / (LAYOUT.token_bytes * self.size))
        self.clients[client].store(random_kv(chunks * self.size), fresh_tokens(chunks * self.size), "junk")
        full = memory["memory_total_bytes"] * 0.8
        self.wait(lambda: self.memory()["memory_used_bytes"] < full)
        for salt, word in self.held:
            kv, whole = self.clients[client].retrieve(self.tokens(word), salt), self.kv(word, salt)
            assert kv is None or (whole is not None and torch.equal(kv, whole[:, :, : kv.shape[2]]))
            if (salt, word) in self.locked():
                assert same(kv, whole)
        if self.server.release >= (0, 5, 6) or not self.locked():
            self.clear()  # what is left of the rest is not known
        else:
            self.end_all_leases()
            self.clear()

    @invariant()
    def leased_is_what_it_was(self) -> None:
        for lease in self.leases:
            found = torch.cat([view.flatten(3) for view in lease.views], dim=2) if lease.views else None
            assert same(found, lease.expected)

    def end_all_leases(self) -> None:
        while self.leases:
            self.end_lease(0)

    def teardown(self) -> None:
        self.end_all_leases()
        self.settled()
        self.http.close()


def same(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return torch.equal(found, expected)


def run(server: Server, evicts: bool, examples: int, steps: int) -> None:
    connection = Connection(server.url, server.http_url, MODEL, 60.0, LAYOUT)
    with connection.connect() as one, connection.connect() as other:
        run_state_machine_as_test(
            lambda: Cache(server, (one, other), evicts),
            settings=settings(
                max_examples=examples if server.kind == "embedded" else examples // 3,
                stateful_step_count=steps,
                phases=[Phase.generate],  # shrinking a failure would take minutes, and thirty steps can be read
            ),
        )
    check_clean(server)


def test_any_interleaving_agrees_with_a_model(server):
    run(server, evicts=False, examples=18, steps=30)


def test_also_while_chunks_are_evicted(own_server):
    run(own_server, evicts=True, examples=6, steps=20)


def test_the_model_is_not_satisfied_by_anything(server, monkeypatch):
    """A client that takes another tenant's cache for one's own is found out."""
    true = KVCacheContext.retrieve_many
    monkeypatch.setattr(KVCacheContext, "retrieve_many", lambda self, prefixes, salt: true(self, prefixes, ""))
    with pytest.raises(AssertionError):
        run(server, evicts=False, examples=18, steps=30)
