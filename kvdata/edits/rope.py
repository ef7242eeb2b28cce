"""Moving cached keys to new positions.

Keys are cached after RoPE. A key at position ``p`` is moved to position ``q`` by one more rotation, by
``q - p``: ``k' = k cos(d) + rotate_half(k) sin(d)``, ``d = (q - p) * inv_freq`` (rotations compose; RoFormer,
arXiv 2104.09864). cos and sin are *unscaled*: yarn's attention factor is already in the cached key. The
arithmetic is float32 with one cast at the end: bfloat16 drifts by up to 0.25 on keys of standard deviation 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvdata.errors import GeometryMismatch, UnsupportedLayout

# Families whose rotary pairs adjacent dims (2i, 2i+1) instead of (i, i + dim/2). Each is tested as a whole model.
INTERLEAVED = frozenset({"cohere", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"})

# Further families that pair adjacent dims, in ways not tested; rotating those as halves would be wrong without
# an error. Families with MLA are in the list as well.
REFUSED = frozenset(
    """
    axk1 axk2 bailing_hybrid blt codegen cohere2 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
    glm4_moe_lite glm_moe_dsa gptj llama4 llama4_text longcat_flash mistral4 moonshine youtu
    """.split()  # noqa: SIM905 - a list of families reads better as words
)


# Families in which some layers have no RoPE.
_SOME_LAYERS = frozenset({"smollm3"})


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotary embedding of one model: the first `rotary_dim` dims of a head rotate, the rest not.

    Args:
        inv_freq: float32 ``[rotary_dim / 2]``, radians per position; ``[L, rotary_dim / 2]`` when layers differ,
            zeros for a layer without RoPE.
        head_dim: size of one head.
        interleaved: dims ``(2i, 2i + 1)`` rotate together instead of ``(i, i + rotary_dim / 2)``.
    """

    inv_freq: Tensor
    head_dim: int
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """Number of leading dims of each head that rotate."""
        return 2 * self.inv_freq.shape[-1]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Rope:
        """From a model's ``config.json``, in transformers 5's style (``rope_parameters``) or the older one.

        Raises:
            UnsupportedLayout: frequencies that change with length (dynamic, longrope) or differ between
                layer types, MLA, families whose pairing is not known to be right, or no RoPE at all.
        """
        text: Mapping[str, Any] = config.get("text_config") or config
        _refuse_other_rotations(text)
        parameters = _rope_parameters(text)
        kind = parameters["rope_type"]
        if kind not in _FREQUENCIES:
            raise UnsupportedLayout(f"rope type {kind!r} cannot be re-rotated; supported are {', '.join(_FREQUENCIES)}")
        head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        rotary_dim = int(head_dim * parameters["partial_rotary_factor"])
        base = parameters["rope_theta"] ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
        inv_freq = _FREQUENCIES[kind](1.0 / base, parameters)
        if (rotating := _layers_with_rope(text)) is not None:
            inv_freq = rotating[:, None] * inv_freq
        return cls(inv_freq, head_dim, interleaved=text.get("model_type") in INTERLEAVED)

    def rerotate(self, keys: Tensor, old_positions: Tensor | int, new_positions: Tensor | int) -> Tensor:
        """Post-RoPE keys moved from `old_positions` to `new_positions`.

        Args:
            keys: ``[..., T, head_dim]``; ``[L, ..., T, head_dim]`` when layers differ.
            old_positions, new_positions: token positions, any shape that broadcasts to ``keys.shape[:-1]``
                (``[T]`` for all heads alike, ``[L, H, T]`` when each head kept its own tokens).

        Returns:
            A new tensor of the shape and dtype of `keys`.

        Raises:
            GeometryMismatch: the last axis is not one head, or the first not the layers.
        """
        if keys.shape[-1] != self.head_dim:
            raise GeometryMismatch(f"keys end in {keys.shape[-1]} dims, one head has {self.head_dim}")
        inv_freq = self.inv_freq.to(keys.device)
        if inv_freq.dim() == 2:
            if keys.shape[0] != len(inv_freq):
                raise GeometryMismatch(f"keys {tuple(keys.shape)} do not start with the {len(inv_freq)} layers")
            inv_freq = inv_freq.view(-1, *[1] * (keys.dim() - 2), inv_freq.shape[1])
        delta = torch.as_tensor(new_positions, device=keys.device) - torch.as_tensor(old_positions, device=keys.device)
        angle = delta.float().unsqueeze(-1) * inv_freq
        cos, sin = angle.cos(), angle.sin()
        rotating, rest = keys[..., : self.rotary_dim], keys[..., self.rotary_dim :]
        wide = rotating.float()
        first, second = (wide[..., ::2], wide[..., 1::2]) if self.interleaved else wide.chunk(2, dim=-1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.stack(pair, dim=-1).flatten(-2) if self.interleaved else torch.cat(pair, dim=-1)
        return torch.cat((turned.to(keys.dtype), rest), dim=-1)


def _refuse_other_rotations(config: Mapping[str, Any]) -> None:
    family = str(config.get("model_type", ""))
    if config.get("kv_lora_rank"):
        raise UnsupportedLayout(f"{family} uses multi-head latent attention (MLA); its keys are not [H, head_dim]")
    if family in REFUSED or config.get("rope_interleave"):
        raise UnsupportedLayout(f"{family} rotates adjacent dims (interleaved RoPE) in a way not supported yet")
    if config.get("no_rope_layers") and family not in _SOME_LAYERS:
        raise UnsupportedLayout(f"{family} has layers without RoPE, which is not supported yet")


def _layers_with_rope(config: Mapping[str, Any]) -> Tensor | None:
    """Float ``[L]``, 1 for a layer with RoPE and 0 for one without; None when all have it."""
    if config.get("model_type") not in _SOME_LAYERS:
        return None
    layers = config.get("no_rope_layers")  # despite its name, 1 means that the layer has it
    if layers is None:
        interval = config.get("no_rope_layer_interval") or 4
        layers = [(layer + 1) % interval != 0 for layer in range(config["num_hidden_layers"])]
    return None if all(layers) else torch.tensor([float(bool(layer)) for layer in layers])


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Either config style as one dict with ``rope_type``, ``rope_theta``, ``partial_rotary_factor``, ..."""
    stored = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in stored.values()):
        raise UnsupportedLayout("the RoPE differs between layer types, which is not supported yet")
    # Checkpoints of the first Llama generation name no theta, but they do have the key `rope_scaling`.
    theta = stored.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base")
    if theta is None and "rope_scaling" not in config:
        raise UnsupportedLayout("the config names no rope_theta: the model has no RoPE, or one unknown here")
    partial = stored.get("partial_rotary_factor") or config.get("partial_rotary_factor") or config.get("rotary_pct")
    limit = config.get("max_position_embeddings")
    parameters = {
        **stored,
        "rope_type": stored.get("rope_type") or stored.get("type") or "default",
        "rope_theta": float(theta or 10000.0),
        "partial_rotary_factor": float(partial or 1.0),
        "original_max_position_embeddings": stored.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or limit,
    }
    if "mrope_section" in stored:
        parameters["rope_type"] = "mrope"
    if parameters.get("factor") is None and limit:
        parameters["factor"] = limit / parameters["original_max_position_embeddings"]
    return parameters


def _default(inv_freq: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    return inv_freq


def _linear(inv_freq: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Position interpolation (arXiv 2306.15595): every frequency divided by the factor."""
    return inv_freq / float(parameters["factor"])


def _llama3(inv_freq: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a linear blend between the two."""
    original = parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = original * inv_freq / (2 * math.pi)  # rotations within the original context
    kept: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (kept + (1 - kept) / float(parameters["factor"]))


def _yarn(inv_freq: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a blend over the dims between two numbers of rotations.

    Only the frequencies: the attention factor scales cos and sin as the model rotates, and so is in the key.
    """
    dim = 2 * inv_freq.numel()
    original, theta = parameters["original_max_position_embeddings"], parameters["rope_theta"]

    def dim_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(parameters.get("beta_fast") or 32), dim_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001  # as in the reference code: a step instead of a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq * (1 - ramp) + inv_freq / float(parameters["factor"]) * ramp


_FREQUENCIES: dict[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
