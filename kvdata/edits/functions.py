"""Edits ready for ``batch.modify``: drop tokens of a cache or code all of them, and derive the new address.

    batch.modify(keydiff(config, keep=0.5))  # config: the model's config.json as a dict
    batch.modify(snapkv(config, engine.queries, keep=0.5))  # engine: a HuggingFaceEngine of the same model

Axes: ``2`` K/V, ``L`` layers, ``H`` KV heads, ``Hq`` query heads, ``T`` tokens, ``K`` kept tokens,
``D = H * head_dim``.

What is kept is a whole number of chunks, at least one; the autoencoder keeps every token. It is stored under a salt of
its own, derived from the whole source, policy and revision (see `kvdata.edits.address`), so that it never mixes with
the full cache or with another source that begins alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from blake3 import blake3
from torch import Tensor, nn

from kvdata.edits import policies
from kvdata.edits.address import compressed_salt
from kvdata.edits.cartridge import CartridgeMethod
from kvdata.edits.policies import Policy, Sees, Source, apply_policy
from kvdata.edits.rope import Rope
from kvdata.edits.selection import compact
from kvdata.errors import GeometryMismatch, InvalidRequest
from kvdata.models.cartridge import Cartridge
from kvdata.models.kv_autoencoder import KVAutoencoder
from kvdata.models.token_scorer import TokenScorer

SINKS, WINDOW = 4, 32

Queries = Callable[[list[int]], Tensor]
"""A prefix's token ids -> its queries before RoPE, ``[L, Hq, T, head_dim]``: `HuggingFaceEngine.queries`."""


class Method(Protocol):
    """How an edit picks what it keeps."""

    @property
    def name(self) -> str:
        """For the salt: whatever tells its caches of one source apart, besides the number of tokens kept."""

    def compress(
        self, kv: Tensor, tokens: list[int], kept: int, chunk_size: int, rope: Rope, num_kv_heads: int
    ) -> tuple[Tensor, list[int]]:
        """``[2, L, T, D]`` and T ids -> ``[2, L, kept, D]`` at positions ``0 .. kept-1``, and `kept` ids."""


@dataclass(frozen=True)
class Edit:
    """An edit for ``batch.modify``; make one with the functions of this module.

    Args:
        method: picks what is kept.
        rope: the model's.
        num_kv_heads: the model's.
        keep: share of tokens kept, rounded down to whole chunks.
        revision: part of the address; other weights or code under the same name need another.
    """

    method: Method
    rope: Rope
    num_kv_heads: int
    keep: float = 0.5
    revision: str = "r1"

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise InvalidRequest(f"keep must be a share above 0 and at most 1, got {self.keep}")

    def __call__(self, kv: Tensor | Mapping[Any, Tensor], tokens: Sequence[int]) -> tuple[Tensor, list[int]]:
        """The edit as a plain function, to the token instead of the chunk, without an address.

        Meant for use inside an edit of your own. Called through one, the result is stored under the stream's
        salt, where the full cache is: return other token ids, or give the stream a salt.
        """
        tensor = kv["kv"] if isinstance(kv, Mapping) else kv
        edited, ids, _ = self.derive(tensor, tokens, 1, "")
        return edited, ids

    def derive(
        self, kv: Tensor, tokens: Sequence[int], chunk_size: int, cache_salt: str
    ) -> tuple[Tensor, list[int], str]:
        """The compressed cache ``[2, L, K, D]``, and the K token ids and the salt under which it is stored.

        Args:
            kv: ``[2, L, T, D]``, T a whole number of chunks.
            tokens: its T token ids.
            chunk_size: the server's.
            cache_salt: salt of the source; the derived one starts with it.
        """
        source = [int(token) for token in tokens]
        if len(source) != kv.shape[2]:
            raise GeometryMismatch(f"{len(source)} tokens for kv of shape {tuple(kv.shape)}; they must agree in T")
        chunks = len(source) // chunk_size
        kept = chunk_size * max(1, int(chunks * self.keep + 1e-9))
        edited, ids = self.method.compress(kv, source, kept, chunk_size, self.rope, self.num_kv_heads)
        return edited, ids, compressed_salt(source, f"{self.method.name}.{kept}", self.revision, cache_salt)


@dataclass(frozen=True)
class MiddleChunks:
    """Keeps the first and last chunks, the same in every head, under the ids that were kept."""

    name: str = "middle-chunks"

    def compress(
        self, kv: Tensor, tokens: list[int], kept: int, chunk_size: int, rope: Rope, num_kv_heads: int
    ) -> tuple[Tensor, list[int]]:
        head = (kept // chunk_size + 1) // 2 * chunk_size  # the first chunk holds the attention sinks
        places = [*range(head), *range(len(tokens) - (kept - head), len(tokens))]
        index = torch.tensor(places).expand(kv.shape[1], num_kv_heads, -1)
        return compact(kv, index, rope), [tokens[place] for place in places]


@dataclass(frozen=True)
class PolicyMethod:
    """Keeps what a `Policy` scores highest, under the first ids: each head keeps other tokens."""

    policy: Policy
    sinks: int = SINKS
    window: int = WINDOW
    per_head: bool = True
    queries: Queries | None = None

    @property
    def name(self) -> str:
        parts = [self.policy.name, *_options(self.policy)]
        if (self.sinks, self.window) != (SINKS, WINDOW):
            parts.append(f"s{self.sinks}w{self.window}")
        if not self.per_head:
            parts.append("shared")
        return ".".join(parts)

    def compress(
        self, kv: Tensor, tokens: list[int], kept: int, chunk_size: int, rope: Rope, num_kv_heads: int
    ) -> tuple[Tensor, list[int]]:
        edited, _ = apply_policy(
            self.policy,
            kv,
            kept,
            rope,
            num_kv_heads,
            Source(tokens=tokens, queries=self.queries(tokens) if self.queries else None),
            sinks=self.sinks,
            window=self.window,
            per_head=self.per_head,
        )
        return edited, tokens[:kept]


@dataclass(frozen=True)
class Reconstruction:
    """Keeps every token, as an autoencoder gives it back."""

    autoencoder: KVAutoencoder
    name: str = "autoencoder"

    @torch.no_grad()
    def compress(
        self, kv: Tensor, tokens: list[int], kept: int, chunk_size: int, rope: Rope, num_kv_heads: int
    ) -> tuple[Tensor, list[int]]:
        return self.autoencoder(kv.unsqueeze(0))[0], tokens


def drop_middle_chunks(config: Mapping[str, Any], keep: float = 0.5, revision: str = "r1") -> Edit:
    """Drop whole chunks out of the middle."""
    return Edit(MiddleChunks(), Rope.from_config(config), _kv_heads(config), keep, revision)


def policy_edit(
    policy: Policy,
    config: Mapping[str, Any],
    keep: float = 0.5,
    revision: str = "r1",
    sinks: int = SINKS,
    window: int = WINDOW,
    per_head: bool = True,
    queries: Queries | None = None,
) -> Edit:
    """Keep what any policy prefers, and always `sinks` first and `window` last tokens (see `select`).

    Args:
        queries: called with a prefix's token ids, for policies that see its queries. It computes the prefix once
            more: an engine that only serves does not hand out queries.

    Raises:
        UnsupportedLayout: keys of this model cannot be moved (see `Rope.from_config`).
        InvalidRequest: `keep` is not a share, or the policy sees what an edit does not have.
    """
    if policy.sees is Sees.QUERIES and queries is None:
        raise InvalidRequest(f"the {policy.name} policy sees the prefix's queries: give queries=engine.queries")
    if policy.sees in (Sees.QUESTION, Sees.FUTURE):
        raise InvalidRequest(f"the {policy.name} policy sees the {policy.sees.value}, which an edit does not have")
    method = PolicyMethod(policy, sinks, window, per_head, queries)
    return Edit(method, Rope.from_config(config), _kv_heads(config), keep, revision)


def random(config: Mapping[str, Any], keep: float = 0.5, seed: int = 0, **options: Any) -> Edit:
    """Random tokens in each layer and head, the same for the same prompt and seed. Options: as `policy_edit`."""
    return policy_edit(policies.Random(seed), config, keep, **options)


def sinks_and_recency(config: Mapping[str, Any], keep: float = 0.5, **options: Any) -> Edit:
    """The first and the last tokens (StreamingLLM, arXiv 2309.17453). Options: as `policy_edit`."""
    return policy_edit(policies.Recency(), config, keep, **options)


def key_norm(config: Mapping[str, Any], keep: float = 0.5, **options: Any) -> Edit:
    """Tokens with small keys (arXiv 2406.11430). Options: as `policy_edit`."""
    return policy_edit(policies.KeyNorm(), config, keep, **options)


def keydiff(config: Mapping[str, Any], keep: float = 0.5, **options: Any) -> Edit:
    """Tokens whose keys differ most from the mean key (arXiv 2504.15364). Options: as `policy_edit`."""
    return policy_edit(policies.KeyDiff(), config, keep, **options)


def value_norm(config: Mapping[str, Any], keep: float = 0.5, **options: Any) -> Edit:
    """Tokens with large values (arXiv 2406.12335). Options: as `policy_edit`."""
    return policy_edit(policies.ValueNorm(), config, keep, **options)


def snapkv(config: Mapping[str, Any], queries: Queries, keep: float = 0.5, **options: Any) -> Edit:
    """What the prefix's last queries attend to (arXiv 2404.14469). Options: as `policy_edit`."""
    return policy_edit(policies.SnapKV(Rope.from_config(config)), config, keep, queries=queries, **options)


def tova(config: Mapping[str, Any], queries: Queries, keep: float = 0.5, **options: Any) -> Edit:
    """What the prefix's last query attends to (arXiv 2401.06104). Options: as `policy_edit`."""
    return policy_edit(policies.TOVA(Rope.from_config(config)), config, keep, queries=queries, **options)


def expected_attention(config: Mapping[str, Any], queries: Queries, keep: float = 0.5, **options: Any) -> Edit:
    """The attention to expect from later queries (arXiv 2510.00636). Options: as `policy_edit`."""
    return policy_edit(policies.ExpectedAttention(Rope.from_config(config)), config, keep, queries=queries, **options)


def r_kv(config: Mapping[str, Any], queries: Queries, keep: float = 0.5, **options: Any) -> Edit:
    """What the prefix's last queries attend to and other keys do not say (arXiv 2505.24133). Options: `policy_edit`."""
    return policy_edit(policies.RKV(Rope.from_config(config)), config, keep, queries=queries, **options)


def compaction(config: Mapping[str, Any], queries: Queries, keep: float = 0.5, **options: Any) -> Edit:
    """Attention matching (arXiv 2602.16284): keep keys and refit their values. Options: as `policy_edit`."""
    return policy_edit(policies.Compaction(Rope.from_config(config)), config, keep, queries=queries, **options)


def learned(
    path: str | Path, config: Mapping[str, Any], keep: float = 0.5, revision: str | None = None, **options: Any
) -> Edit:
    """What a trained `TokenScorer` prefers.

    Args:
        path: a file of `TokenScorer.save`.
        config: of the model whose caches it was trained on.
        revision: default is a hash of the weights, so that newly trained ones get addresses of their own.
        options: as `policy_edit`.

    Raises:
        GeometryMismatch: the scorer is that of another model.
        InvalidRequest: the file is no token scorer.
    """
    policy, weights = scorer_policy(path, config)
    return policy_edit(policy, config, keep, revision or weights, **options)


def scorer_policy(path: str | Path, config: Mapping[str, Any], name: str = "learned") -> tuple[policies.Learned, str]:
    """`learned_policy` of a file of `TokenScorer.save`; arguments and errors as `learned`."""
    scorer = TokenScorer.load(path)
    _check_model(scorer, config, path)
    return learned_policy(scorer, weights_revision(scorer), name)


def learned_policy(
    scorer: TokenScorer, weights: str, name: str = "learned", refit: bool = True
) -> tuple[policies.Learned, str]:
    """A scorer's policy and the revision of what it makes.

    Args:
        weights: the scorer's `weights_revision`.
        refit: fit the kept tokens' values, for the queries that the scorer predicts, to what the whole cache says.
    """
    if not refit:
        return policies.Learned(scorer, name), weights
    return policies.Learned(scorer, name, policies.ValueRefit(scorer.queries, scorer.rope)), f"{weights}.refit"


def autoencoder(path: str | Path, config: Mapping[str, Any], revision: str | None = None) -> Edit:
    """What a trained `KVAutoencoder` keeps of every token; the cache stays as long as it was.

    Args:
        path: a file of `KVAutoencoder.save`.
        config: of the model whose caches it was trained on.
        revision: default is a hash of the weights, so that newly trained ones get addresses of their own.

    Raises:
        GeometryMismatch: the autoencoder is that of another model.
        InvalidRequest: the file is no autoencoder.
    """
    model, weights = autoencoder_model(path, config)
    return Edit(Reconstruction(model), Rope.from_config(config), _kv_heads(config), 1.0, revision or weights)


def autoencoder_model(path: str | Path, config: Mapping[str, Any]) -> tuple[KVAutoencoder, str]:
    """A `KVAutoencoder` and the revision of its weights; arguments and errors as `autoencoder`."""
    model = KVAutoencoder.load(path)
    _check_model(model, config, path)
    return model, weights_revision(model)


def cartridge(path: str | Path, config: Mapping[str, Any], revision: str | None = None) -> Edit:
    """The learned slots of one document in place of its cache; another document's is refused with `OtherSource`.

    Args:
        path: a file of `Cartridge.save`, or a checkpoint of the recipe.
        config: of the model whose cache it was trained against.
        revision: default is a hash of the weights.

    Raises:
        GeometryMismatch: the cartridge is that of another model.
        InvalidRequest: the file is no cartridge, or was saved before it had a document.
    """
    trained, weights = cartridge_model(path, config)
    keep = trained.slots / trained.source_tokens
    return Edit(CartridgeMethod(trained), Rope.from_config(config), _kv_heads(config), keep, revision or weights)


def cartridge_model(path: str | Path, config: Mapping[str, Any]) -> tuple[Cartridge, str]:
    """A `Cartridge` and the revision of its weights; arguments and errors as `cartridge`."""
    trained = Cartridge.load(path)
    if (trained.num_kv_heads, trained.head_dim) != (_kv_heads(config), Rope.from_config(config).head_dim):
        raise GeometryMismatch(f"{path} was trained for a model with other heads than this config's")
    if not trained.source:
        raise InvalidRequest(f"{path} stands for no document yet; train it first")
    return trained, weights_revision(trained)


def weights_revision(model: nn.Module) -> str:
    """8 hex digits of blake3 over the a model's weights."""
    digest = blake3()
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:8]


def _options(policy: Policy) -> list[str]:
    """A policy's options that are not the default, e.g. ``["seed7"]``: they tell its caches apart."""
    if not is_dataclass(policy):
        return []
    values = [(f, getattr(policy, f.name)) for f in fields(policy) if f.name != "name"]
    return [f"{f.name}{value}" for f, value in values if isinstance(value, (int, float, str)) and value != f.default]


def _check_model(model: TokenScorer | KVAutoencoder, config: Mapping[str, Any], path: str | Path) -> None:
    rope = Rope.from_config(config)
    same = model.inv_freq.shape == rope.inv_freq.shape and torch.allclose(model.inv_freq, rope.inv_freq)
    if not same or (model.num_kv_heads, model.head_dim) != (_kv_heads(config), rope.head_dim):
        raise GeometryMismatch(f"{path} was trained for a model with other heads or RoPE than this config's")


def _kv_heads(config: Mapping[str, Any]) -> int:
    text = config.get("text_config") or config
    return int(text.get("num_key_value_heads") or text["num_attention_heads"])
