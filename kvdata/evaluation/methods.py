"""What is compared: anything that makes a smaller cache out of a cache.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``K`` kept tokens, ``D = num_kv_heads * head_dim``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3
from torch import Tensor

from kvdata.edits.address import source_digest
from kvdata.edits.functions import SINKS, WINDOW, autoencoder_model, cartridge_model, scorer_policy
from kvdata.edits.policies import POLICIES, Policy, Sees, Source, apply_policy
from kvdata.edits.rope import Rope
from kvdata.errors import InvalidRequest, OtherSource
from kvdata.evaluation.runs import FULL
from kvdata.models.cartridge import Cartridge
from kvdata.models.kv_autoencoder import KVAutoencoder


class Method(Protocol):
    """Compresses caches; declares what it looks at, and whether it was trained."""

    @property
    def name(self) -> str:
        """Short, usable in a cache salt."""

    @property
    def revision(self) -> str:
        """Of its weights or code: part of the address."""

    @property
    def sees(self) -> Sees: ...

    @property
    def trained(self) -> bool: ...

    @property
    def documents(self) -> frozenset[str] | None:
        """`source_digest` of the prefixes that it has a cache for; None where it compresses any."""

    def share(self, tokens: int) -> float | None:
        """Of the bytes of so many tokens, where it makes caches of one size only; None: as is asked for."""

    def compress(self, kv: Tensor, keep: int, source: Source) -> Tensor:
        """``[2, L, T, D]`` -> ``[2, L, K, D]``, keys at positions ``0 .. K-1``, K whole chunks (`keep`, if it drops).

        Args:
            source: the tokens, and what `sees` asks for.
        """


@dataclass(frozen=True)
class Dropping:
    """A token dropping policy as a method; sinks and window are the same for all, and part of the budget."""

    policy: Policy
    rope: Rope
    num_kv_heads: int
    revision: str = "r1"
    sinks: int = SINKS
    window: int = WINDOW
    documents: frozenset[str] | None = None

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def sees(self) -> Sees:
        return self.policy.sees

    @property
    def trained(self) -> bool:
        return self.policy.trained

    def share(self, tokens: int) -> float | None:
        return None

    def compress(self, kv: Tensor, keep: int, source: Source) -> Tensor:
        smaller, _ = apply_policy(
            self.policy, kv, keep, self.rope, self.num_kv_heads, source, sinks=self.sinks, window=self.window
        )
        return smaller


@dataclass(frozen=True)
class Encoding:
    """A KV autoencoder as a method: every token stays, and its code takes a share of the bytes.

    What is stored and measured is what the code gives back, a cache of the full size. It is compared at the budget that
    is its own.
    """

    autoencoder: KVAutoencoder
    name: str
    revision: str
    sees: Sees = Sees.CACHE
    trained: bool = True
    documents: frozenset[str] | None = None

    def share(self, tokens: int) -> float | None:
        return self.autoencoder.ratio(tokens)

    def compress(self, kv: Tensor, keep: int, source: Source) -> Tensor:
        restored: Tensor = self.autoencoder(kv.unsqueeze(0))[0]
        return restored


class Replacing:
    """Cartridges as a method: each stands for one document, whose cache its slots replace.

    Args:
        cartridges: one for each document that is evaluated, all of so many slots.
        revision: of all of them.
    """

    name = "cartridge"
    sees = Sees.CACHE
    trained = True

    def __init__(self, cartridges: Sequence[Cartridge], revision: str) -> None:
        self._of = {cartridge.source: cartridge for cartridge in cartridges}
        self._slots, *others = sorted({cartridge.slots for cartridge in cartridges})
        if others:
            raise InvalidRequest(f"cartridges of {self._slots} and {others} slots cannot be compared at one budget")
        if len(self._of) < len(cartridges):
            raise InvalidRequest("two cartridges stand for the same document; give one of them")
        self.revision = revision
        self.documents: frozenset[str] | None = frozenset(self._of)

    def share(self, tokens: int) -> float | None:
        return self._slots / tokens

    def compress(self, kv: Tensor, keep: int, source: Source) -> Tensor:
        """Raises `OtherSource` for a document that none of the cartridges stands for."""
        ids = source.tokens or ()
        check_document(self, ids)
        return self._of[source_digest(ids)].slots_as(kv.dtype)


def check_document(method: Method, ids: Sequence[int]) -> None:
    """`OtherSource` where a method has no cache for this prefix."""
    if method.documents is not None and (digest := source_digest(ids)) not in method.documents:
        raise OtherSource(
            f"no {method.name} stands for the prefix of {len(ids)} tokens with digest {digest}; train one, or evaluate "
            "a prefix file that holds only the documents that have one"
        )


def for_any_prefix(methods: Iterable[Method]) -> list[Method]:
    """Those that compress whatever comes, such as passkey prompts."""
    return [method for method in methods if method.documents is None]


def methods_named(
    config: Mapping[str, Any],
    num_kv_heads: int,
    names: Iterable[str] | None = None,
    scorers: Iterable[Path] = (),
    autoencoders: Iterable[Path] = (),
    cartridges: Iterable[Path] = (),
) -> list[Method]:
    """Policies by name (default: all of them), and trained modules by file, each under its file's name.

    Cartridges are one method together.

    Raises:
        InvalidRequest: an unknown name, a name that is there twice, or a file that holds something else.
        GeometryMismatch: a module of another model.
        UnsupportedLayout: keys of this model cannot be moved.
    """
    rope = Rope.from_config(config)
    chosen = list(POLICIES if names is None else names)
    if unknown := [name for name in chosen if name not in POLICIES]:
        raise InvalidRequest(f"unknown policies: {', '.join(unknown)}; known are {', '.join(POLICIES)}")
    methods: list[Method] = [Dropping(POLICIES[name](rope), rope, num_kv_heads) for name in chosen]
    for file in scorers:
        policy, revision = scorer_policy(file, config, name=file.stem)
        methods.append(Dropping(policy, rope, num_kv_heads, revision))
    for file in autoencoders:
        model, revision = autoencoder_model(file, config)
        methods.append(Encoding(model, file.stem, revision))
    if loaded := [cartridge_model(file, config) for file in cartridges]:
        revisions = sorted(revision for _, revision in loaded)
        methods.append(Replacing([model for model, _ in loaded], blake3("".join(revisions).encode()).hexdigest(4)))
    all_names = [FULL, *(method.name for method in methods)]
    if twice := sorted({name for name in all_names if all_names.count(name) > 1}):
        raise InvalidRequest(f"two methods are named {', '.join(twice)}; rename a file, or ask for it once")
    return methods


def takes(method: Method, keep: float, tokens: int) -> bool:
    """Whether a method makes caches of so many tokens to that share, within a hundredth."""
    share = method.share(tokens)
    return share is None or abs(share - keep) < 0.01


def kept_tokens(tokens: int, keep: float, chunk_size: int) -> int:
    """The budget in whole chunks, at least one, of a share of `tokens`: sinks and window are part of it.

    Raises:
        InvalidRequest: `keep` is not a share above 0 and below 1.
    """
    if not 0 < keep < 1:
        raise InvalidRequest(f"keep must be a share above 0 and below 1, got {keep}")
    return chunk_size * max(1, int(tokens // chunk_size * keep + 1e-9))
