"""One request that goes through several passes: prefill, edit its cache, decode from what was stored.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``D = num_kv_heads * head_dim``.

A stream is a token sequence and a salt. `LMCacheStream.tokens` is what the server's cache is asked for;
`suffix_tokens` are those that follow it and are sent with the next request: the part of the last chunk that no
server stores, and tokens generated since.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from kvdata.client.context import KVCacheContext
from kvdata.errors import InvalidRequest, MissingKV, StoreConflict
from kvdata.wire.keys import Tokens, check_salt, token_list

log = logging.getLogger("kvdata")


class LMCacheSDKCacheKind(str, Enum):
    """Kinds of cached tensors; as a dict key it equals its plain string, here ``"kv"``."""

    KV = "kv"


@dataclass(frozen=True)
class TokenEvent:
    """One generated token, with the text it added (or ""), and its log-probability if that was asked for."""

    token_id: int
    text: str = ""
    logprob: float | None = None


class PostCompletion(Protocol):
    """Asks an engine to go on from a prompt; yields one `TokenEvent` per generated token."""

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str, /
    ) -> Iterable[TokenEvent]: ...


@runtime_checkable
class DerivedEdit(Protocol):
    """An edit that knows where its result belongs; all of `kvdata.edits.functions` are."""

    def derive(
        self, kv: torch.Tensor, tokens: Sequence[int], chunk_size: int, cache_salt: str
    ) -> tuple[torch.Tensor, list[int], str]:
        """The edited ``[2, L, T', D]``, and token ids and salt under which it is to be stored."""


KVTensors: TypeAlias = torch.Tensor | Mapping[Any, torch.Tensor]
EditFunction: TypeAlias = Callable[[Any, Sequence[int]], tuple[KVTensors, Tokens]]


@dataclass(frozen=True)
class Usage:
    """Tokens that went in and came out of one pass of one stream."""

    input_tokens: int
    output_tokens: int


class LMCacheStream:
    """One request over several passes. Make it with `create_request`, run it in an `LMCacheBatchedStream`.

    Attributes:
        tokens: the sequence whose cache is meant; after `modify` the ids under which the edited one is stored.
        suffix_tokens: ids that follow `tokens` and are sent with the next request.
        cache_salt: the salt the next request carries; a built-in edit changes it.
        output_tokens: ids generated so far, over all passes.
        is_done: the last pass ended before ``max_tokens``.
        error: what a batch's phase failed with for this stream; it then takes no part in later phases.
    """

    def __init__(
        self,
        ctx: KVCacheContext,
        post_completion: PostCompletion,
        prompt_token_ids: Tokens,
        cache_salt: str = "",
        by_kind: bool = False,
    ) -> None:
        check_salt(cache_salt)
        self.ctx = ctx
        self.post_completion = post_completion
        self.cache_salt = cache_salt
        self.tokens = token_list(prompt_token_ids)
        if not self.tokens:
            raise InvalidRequest("prompt_token_ids is empty; a request needs at least one token")
        self.suffix_tokens: list[int] = []
        self.output_tokens: list[int] = []
        self.is_done = False
        self.error: Exception | None = None
        self._by_kind = by_kind
        self._texts: list[str] = []
        self._computed = len(self.tokens)  # leading tokens whose KV the server must come to hold

    @property
    def output_text(self) -> str:
        """Text generated so far, over all passes."""
        return "".join(self._texts)

    def generate(self, sampling_params: Mapping[str, Any]) -> Usage:
        """One request: `tokens` and `suffix_tokens` in; what comes back is appended to `tokens`.

        Tokens that arrived before an error stay in the sequence.
        """
        self.tokens += self.suffix_tokens
        self.suffix_tokens = []
        sent = list(self.tokens)
        self._computed = len(sent)
        generated = 0
        for event in self.post_completion(list(sent), dict(sampling_params), self.cache_salt):
            if event.token_id < 0:
                raise InvalidRequest(
                    f"post_completion reported the token id {event.token_id}; it must report the real id of each "
                    "token (vLLM: return_token_ids, or --return-tokens-as-token-ids with logprobs)"
                )
            generated += 1
            self.tokens.append(event.token_id)
            self.output_tokens.append(event.token_id)
            self._texts.append(event.text)
        self.is_done = generated < sampling_params.get("max_tokens", 1)
        return Usage(len(sent), generated)

    def modify(
        self,
        fn: EditFunction | DerivedEdit,
        settle_seconds: float = 10.0,
        one_at_a_time: AbstractContextManager[Any] | threading.Lock | None = None,
    ) -> Usage:
        """Retrieve the chunk-aligned cache, edit it, store the result, and go on from there.

        Nothing about the stream changes unless all of it succeeds.

        Args:
            fn: ``fn(kv, tokens) -> (kv, tokens)``, or a `DerivedEdit`.
            settle_seconds: how long to wait for an engine that is still storing.
            one_at_a_time: held while editing and storing, not while retrieving.

        Raises:
            MissingKV: the server holds nothing of it.
            StoreConflict: the server already holds another cache under the edit's address.
            KVCacheSDKError: as `KVCacheContext.retrieve` and `store`; and whatever `fn` raises.
        """
        kv = self._retrieve(settle_seconds)
        hit = kv.shape[2]
        with one_at_a_time or nullcontext():
            edited, tokens, salt = self._edit(fn, kv, self.tokens[:hit])
            self._store(edited, tokens, salt)
        aligned = len(tokens) // self.ctx.chunk_size * self.ctx.chunk_size
        self.suffix_tokens = tokens[aligned:] + self.tokens[hit:] + self.suffix_tokens
        self.tokens, self.cache_salt = tokens[:aligned], salt
        self._computed = aligned
        self.is_done = False
        return Usage(hit, aligned)

    def _retrieve(self, settle_seconds: float) -> torch.Tensor:
        """``[2, L, hit, D]``; engines store after they have answered, so the last chunks may come late."""
        wanted = self._computed // self.ctx.chunk_size * self.ctx.chunk_size
        if not wanted:
            raise InvalidRequest(
                f"{self._computed} tokens are less than one chunk of {self.ctx.chunk_size}: there is no cache to edit"
            )
        found = self.ctx.wait_cached(self.tokens[: self._computed], self.cache_salt, settle_seconds)
        kv = self.ctx.retrieve(self.tokens, self.cache_salt)
        if kv is None:
            raise MissingKV(
                f"the server holds nothing of these {len(self.tokens)} tokens under salt {self.cache_salt!r} after "
                f"{settle_seconds:g} s. Run prefill first; is the engine connected to this server, and does it "
                "register the model under the context's model name?"
            )
        if found < wanted:
            log.warning("only %d of %d tokens are cached; the edit sees those, the rest is sent again", found, wanted)
        return kv

    def _edit(
        self, fn: EditFunction | DerivedEdit, kv: torch.Tensor, tokens: list[int]
    ) -> tuple[torch.Tensor, list[int], str]:
        if isinstance(fn, DerivedEdit):
            return fn.derive(kv, tokens, self.ctx.chunk_size, self.cache_salt)
        new, ids = fn({LMCacheSDKCacheKind.KV: kv} if self._by_kind else kv, tokens)
        if isinstance(new, Mapping):
            new = new[LMCacheSDKCacheKind.KV]
        return new.detach(), token_list(ids), self.cache_salt

    def _store(self, kv: torch.Tensor, tokens: list[int], salt: str) -> None:
        present = self.ctx.lookup(tokens, salt)
        new = self.ctx.store(kv, tokens, salt)
        if not present and new:
            return
        held = self.ctx.retrieve(tokens[:present] if present else tokens, salt)
        if held is not None and not torch.equal(held, kv[:, :, : held.shape[2]]):
            raise StoreConflict(
                f"the server already holds another cache under these token ids and salt {salt!r}, and never "
                "overwrites: give a built-in edit a new revision=, return other token ids from your own edit, give "
                "the stream another cache_salt, or delete the old one with ctx.delete(tokens, cache_salt)"
            )


def create_request(
    contexts: KVCacheContext | Iterable[KVCacheContext],
    post_completion: PostCompletion,
    prompt_token_ids: Tokens,
    cache_salt: str = "",
) -> LMCacheStream:
    """A stream for one request.

    Args:
        contexts: a context: edits get ``kv``, the form of LMCache's SDK to 0.5.2. Or a list of one context:
            edits get ``{LMCacheSDKCacheKind.KV: kv}``, the form from 0.5.3. Built-in edits work in both.
        post_completion: submits a request to the engine, e.g. `kvdata.engines.openai.openai_completion`.
        prompt_token_ids: the prompt.
        cache_salt: isolation domain of the cache.
    """
    if isinstance(contexts, Iterable):
        members = list(contexts)
        if len(members) != 1:
            raise InvalidRequest(f"{len(members)} contexts given; kvdata knows one kind of cache (KV): give one")
        return LMCacheStream(members[0], post_completion, prompt_token_ids, cache_salt, by_kind=True)
    return LMCacheStream(contexts, post_completion, prompt_token_ids, cache_salt)
