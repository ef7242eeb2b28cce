"""A Hugging Face causal LM as engine: it prefills, continues from and attends to ``[2, L, T, D]`` caches.

Axes: ``2`` K/V, ``L`` layers, ``T`` prefix tokens, ``H`` KV heads, ``D = H * head_dim``, ``B`` batch,
``N`` continuation tokens, ``Hq`` query heads, ``V`` vocabulary. Keys are post-RoPE, as the model caches them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvdata.errors import InvalidRequest, UnsupportedLayout

try:
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
except ImportError as exc:
    raise ImportError("kvdata.engines.huggingface needs transformers; run: pip install 'kvdata[hf]'") from exc

from kvdata.edits.rope import Rope
from kvdata.engines.hf_cache import cache_layout, from_dynamic_cache, to_dynamic_cache

__all__ = [
    "AttentionInputs",
    "HuggingFaceEngine",
    "SupportsStore",
    "attention_target",
    "cache_layout",
    "fast_dtype",
    "from_dynamic_cache",
    "to_dynamic_cache",
]

Tokens = Sequence[int] | Tensor


class SupportsStore(Protocol):
    """What `HuggingFaceEngine.store_prefix` needs of a context: `KVCacheContext.store`."""

    def store(self, kv: Tensor, tokens: Sequence[int], cache_salt: str) -> bool: ...


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys and values of N tokens that follow T cached ones, all float32.

    Attributes:
        queries: ``[L, Hq, N, head_dim]``, rotated for positions ``T .. T+N-1``.
        keys, values: ``[L, H, N, head_dim]``, keys rotated for the same positions.
        scale: of the products of queries and keys; None: ``head_dim ** -0.5``.
    """

    queries: Tensor = field(repr=False)
    keys: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    scale: float | None


class HuggingFaceEngine:
    """Prefill, continuation and attention of any causal LM whose layers all keep a full K and V per token.

    Args:
        model: a loaded causal LM; it is put in eval mode.
        tokenizer: kept for the caller, not used here.
        model_name: the name under which the server knows the model; default ``model.config._name_or_path``.
        kv_dtype: element type of the caches handed out (and of `layout`); bfloat16 is what engines store.

    Raises:
        UnsupportedLayout: sliding-window, MLA, shared-KV or hybrid caches.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        model_name: str | None = None,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.model_name: str = model_name or model.config._name_or_path
        self.layout = cache_layout(model.config, kv_dtype)
        self._cache_argument = _cache_argument(model)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype = torch.bfloat16,
        model_name: str | None = None,
    ) -> HuggingFaceEngine:
        """Load model and tokenizer from an HF folder; `model_name` defaults to the folder, as in vLLM."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return cls(model, tokenizer, model_name or str(folder), kv_dtype)

    @property
    def config(self) -> dict[str, Any]:
        """The model's ``config.json`` as a dict (for `kvdata.edits.rope.Rope.from_config`)."""
        config: dict[str, Any] = self.model.config.to_dict()
        return config

    def prefill(self, tokens: Tokens) -> Tensor:
        """One sequence of T token ids -> its cache ``[2, L, T, D]``, CPU, `kv_dtype`."""
        return self.prefill_batch([tokens])[0]

    @torch.inference_mode()
    def prefill_batch(self, batch: Sequence[Tokens]) -> Tensor:
        """B sequences of equal length -> ``[B, 2, L, T, D]``; `InvalidRequest` if the lengths differ."""
        ids = self._ids(batch)
        cache = DynamicCache()
        self.forward(ids, cache, logits_to_keep=1)
        return from_dynamic_cache(cache, self.layout)

    def store_prefix(self, ctx: SupportsStore, tokens: Tokens, cache_salt: str = "") -> bool:
        """Prefill and ``ctx.store``; the context cuts to whole chunks. True: something new was stored."""
        ids = [int(token) for token in tokens]
        return ctx.store(self.prefill(ids), ids, cache_salt)

    @torch.inference_mode()
    def continue_from(self, kv: Tensor, continuation: Tokens, start_position: int | None = None) -> Tensor:
        """Next-token logits of a continuation fed after a cache.

        Args:
            kv: ``[2, L, T, D]`` with `continuation` ``[N]``, or ``[B, 2, L, T, D]`` with ``[B, N]``.
            continuation: token ids. ``logits[i]`` predicts the token *after* ``continuation[i]``.
            start_position: RoPE position of the first continuation token; default T, the compact one. Give
                the original prefix length when kept keys still carry their original positions.

        Returns:
            ``[N, V]`` or ``[B, N, V]``, in the model's dtype.
        """
        return self.logits(kv, continuation, start_position)

    def logits(self, kv: Tensor, continuation: Tokens, start_position: int | None = None) -> Tensor:
        """As `continue_from`, but differentiable: gradients flow into `kv`, to train what a cache holds.

        They also reach the model's weights, unless ``engine.model.requires_grad_(False)`` froze them.
        """
        logits = self._continue(kv, continuation, start_position)
        return logits if kv.dim() == 5 else logits[0]

    @torch.inference_mode()
    def attention(
        self,
        kv: Tensor,
        continuation: Tokens,
        start_position: int | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attention probabilities that the continuation's queries pay to the prefix, ``[(B,) L, Hq, N, T]``.

        Rows sum to less than one: the rest goes to the continuation itself. Arguments as `continue_from`.

        Args:
            reduce: applied to each layer's ``[B, Hq, N, T]`` at once, so that only its result is kept, e.g.
                ``lambda a: attention_target(a, num_kv_heads)``.
        """
        length = kv.shape[-2]
        layers: list[Tensor] = []

        def keep(weights: Tensor) -> None:
            prefix = weights[..., :length].float()
            layers.append((reduce(prefix) if reduce else prefix).cpu())

        with _observe_attention(self.model, keep):
            self._continue(kv, continuation, start_position)
        if len(layers) != self.layout.num_layers:
            raise UnsupportedLayout(
                f"{type(self.model).__name__} handed out the attention of {len(layers)} of its "
                f"{self.layout.num_layers} layers; its eager attention does not return probabilities"
            )
        stacked = torch.stack(layers, dim=1)
        return stacked if kv.dim() == 5 else stacked[0]

    @torch.inference_mode()
    def queries(self, tokens: Tokens, kv: Tensor | None = None) -> Tensor:
        """The queries that these tokens ask, before RoPE: ``[(B,) L, Hq, N, head_dim]``, float32.

        Args:
            tokens: ``[N]`` or ``[B, N]``.
            kv: ``[2, L, T, D]`` or ``[B, 2, L, T, D]``, the cache that they follow; default: nothing comes before.
        """
        rope = Rope.from_config(self.config)
        ids = torch.as_tensor(tokens)
        batched = ids.dim() == 2
        layers: list[Tensor] = []
        with _observe_inputs(self.model, lambda queries, *_: layers.append(queries.float().cpu())):
            if kv is None:
                self.forward(self._ids(ids.view(-1, ids.shape[-1])), DynamicCache(), logits_to_keep=1)
            else:
                self._continue(kv, ids, None)
        start = 0 if kv is None else kv.shape[-2]
        rotated = torch.stack(layers)  # [L, B, Hq, N, head_dim]
        plain = rope.rerotate(rotated, torch.arange(start, start + rotated.shape[3]), 0).transpose(0, 1)
        return plain if batched else plain[0]

    @torch.inference_mode()
    def attention_inputs(self, kv: Tensor, continuation: Tokens) -> AttentionInputs:
        """What the continuation ``[N]`` brings to each layer's attention after a cache ``[2, L, T, D]``."""
        layers: list[tuple[Tensor, Tensor, Tensor]] = []
        scales: list[float | None] = []
        length = kv.shape[2]

        def keep(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> None:
            layers.append((query[0], key[0, :, length:], value[0, :, length:]))
            scales.append(scale)

        with _observe_inputs(self.model, keep):
            self._continue(kv, torch.as_tensor(continuation), None)
        queries, keys, values = (torch.stack(part).float().cpu() for part in zip(*layers, strict=True))
        return AttentionInputs(queries, keys, values, scales[0])

    def _continue(self, kv: Tensor, continuation: Tokens, start_position: int | None) -> Tensor:
        batched = kv.dim() == 5
        ids = self._ids(continuation if batched else [continuation])  # type: ignore[arg-type]
        cache = to_dynamic_cache(kv.to(self.model.device, self.model.dtype), self.layout)
        start = kv.shape[-2] if start_position is None else start_position
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand_as(ids)
        return self.forward(ids, cache, position_ids=positions)

    def _ids(self, batch: Sequence[Tokens] | Tensor) -> Tensor:
        rows = [torch.as_tensor(row, dtype=torch.long).flatten() for row in batch]
        if not rows or not len(rows[0]) or len({len(row) for row in rows}) != 1:
            raise InvalidRequest("a batch needs one or more token sequences of one common, non-zero length")
        return torch.stack(rows).to(self.model.device)

    def forward(self, ids: Tensor, cache: DynamicCache, **kwargs: Any) -> Tensor:
        """The model's own forward over ids ``[B, N]`` after a `DynamicCache`, which grows: logits ``[B, N, V]``."""
        logits: Tensor = self.model(input_ids=ids, use_cache=True, **{self._cache_argument: cache}, **kwargs).logits
        return logits


def fast_dtype() -> torch.dtype:
    """bfloat16 where this CPU multiplies it in hardware (three times as fast), else float32."""
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return torch.bfloat16 if any(getattr(torch.cpu, name, bool)() for name in checks) else torch.float32


def attention_target(attention: Tensor, num_kv_heads: int) -> Tensor:
    """What a token scorer should predict: ``[..., Hq, N, T]`` attention -> ``[..., H, T]``.

    The most that any of the queries attends to a token, mean over the query heads that share a KV head: a token that
    one query cannot do without counts for more than one that all of them glance at.
    """
    most = attention.amax(dim=-2)  # [..., Hq, T]
    return most.reshape(*most.shape[:-2], num_kv_heads, -1, most.shape[-1]).mean(dim=-2)


def _cache_argument(model: Any) -> str:
    """Releases before 5.2x name the cache argument ``past_key_values``, later ones ``cache`` (and warn)."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


_Observer = Callable[[Tensor, Tensor, Tensor, float | None], None]
_OBSERVER: ContextVar[_Observer] = ContextVar("attention_inputs_observer")


def _observed_sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    _OBSERVER.get()(query, key, value, kwargs.get("scaling"))
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


AttentionInterface.register("kvdata_observed_sdpa", _observed_sdpa)
AttentionMaskInterface.register("kvdata_observed_sdpa", sdpa_mask)


@contextmanager
def _observe_inputs(model: Any, keep: _Observer) -> Iterator[None]:
    """Hand each layer's rotated queries ``[B, Hq, N, head_dim]``, all keys and values, and the scale to `keep`."""
    before = model.config._attn_implementation
    token = _OBSERVER.set(keep)
    try:
        model.set_attn_implementation("kvdata_observed_sdpa")
        yield
    finally:
        model.set_attn_implementation(before)
        _OBSERVER.reset(token)


@contextmanager
def _observe_attention(model: Any, keep: Callable[[Tensor], None]) -> Iterator[None]:
    """Run eager attention and hand each layer's probabilities ``[B, Hq, N, T + N]`` to `keep`, in order."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], Tensor):
            keep(output[1])

    before = model.config._attn_implementation
    handles = [
        module.register_forward_hook(hook)
        for module in model.modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    ]
    try:
        model.set_attn_implementation("eager")
        yield
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
