"""Between ``[2, L, T, D]`` tensors and the cache objects of transformers.

Axes: ``2`` K/V, ``L`` layers, ``T`` tokens, ``H`` KV heads, ``D = H * head_dim``, ``B`` batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvdata.errors import GeometryMismatch, UnsupportedLayout
from kvdata.layout import KVLayout


def cache_layout(config: Any, kv_dtype: torch.dtype = torch.bfloat16) -> KVLayout:
    """The `KVLayout` of a model's config.

    Raises:
        UnsupportedLayout: not every layer keeps one full-attention K and V (sliding window, MLA, hybrid).
    """
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedLayout(f"{text.model_type} uses multi-head latent attention (MLA), not K and V per head")
    # transformers itself decides, from the config, which kind of cache each layer gets.
    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    if set(kinds) != {DynamicLayer} or len(kinds) != text.num_hidden_layers:
        names = sorted({kind.__name__ for kind in kinds} - {DynamicLayer.__name__}) or ["shared KV"]
        raise UnsupportedLayout(
            f"{text.model_type} has layers with {', '.join(names)} (sliding-window or hybrid cache); "
            "only models whose layers all use full attention are supported"
        )
    heads = text.num_attention_heads
    return KVLayout(
        num_layers=text.num_hidden_layers,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        dtype=kv_dtype,
    )


def to_dynamic_cache(kv: Tensor, layout: KVLayout) -> DynamicCache:
    """``[2, L, T, D]`` (as a batch of one) or ``[B, 2, L, T, D]`` -> a `DynamicCache`, dtype and device kept.

    Raises:
        GeometryMismatch: the shape does not fit `layout`.
    """
    batch = kv if kv.dim() == 5 else kv.unsqueeze(0)
    if batch.dim() != 5 or batch.shape[1:3] != (2, layout.num_layers) or batch.shape[-1] != layout.hidden:
        raise GeometryMismatch(
            f"kv of shape {tuple(kv.shape)} is not [(B,) 2, {layout.num_layers}, T, {layout.hidden}]"
        )
    # [B, 2, L, T, D] -> [L, 2, B, H, T, head_dim], the order in which the layers take it
    layers = layout.heads(batch).permute(2, 1, 0, 4, 3, 5)
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def from_dynamic_cache(cache: DynamicCache, layout: KVLayout) -> Tensor:
    """A `DynamicCache` -> ``[B, 2, L, T, D]`` on the CPU in ``layout.dtype``."""
    layers: Sequence[Any] = cache.layers  # typed as a union with layers that have no keys
    batch, _, length, _ = layers[0].keys.shape
    kv = torch.empty(batch, 2, layout.num_layers, length, layout.hidden, dtype=layout.dtype)
    by_head = layout.heads(kv)
    for index, layer in enumerate(layers):
        by_head[:, 0, index].copy_(layer.keys.transpose(1, 2))
        by_head[:, 1, index].copy_(layer.values.transpose(1, 2))
    return kv
