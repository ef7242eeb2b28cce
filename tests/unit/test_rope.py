"""Re-rotation against the model library's own rotary, for every supported rope type."""

import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, StableLmConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

from kvdata.edits.rope import INTERLEAVED, Rope
from kvdata.errors import GeometryMismatch, UnsupportedLayout

HEADS, HEAD_DIM, TOKENS = 2, 16, 40
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn-untruncated": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


def llama_config(parameters: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        max_position_embeddings=256,
        rope_parameters=parameters,
    )


def rotated(keys: torch.Tensor, positions: torch.Tensor, rotary: Any) -> torch.Tensor:
    """Keys ``[H, T, head_dim]`` rotated by the library, partial rotary included."""
    cos, sin = rotary(keys, positions[None])
    rotary_dim = cos.shape[-1]
    head, rest = keys[None, ..., :rotary_dim], keys[None, ..., rotary_dim:]
    _, head = apply_rotary_pos_emb(head, head, cos, sin)
    return torch.cat((head, rest), dim=-1)[0]


@pytest.mark.parametrize("name", ROPES)
def test_rerotated_key_equals_the_librarys_rotary_at_the_new_position(name: str) -> None:
    config = llama_config(ROPES[name])
    rotary = LlamaRotaryEmbedding(config)
    keys = 3 * torch.randn(HEADS, TOKENS, HEAD_DIM)
    old = torch.arange(TOKENS) * 5
    new = torch.arange(TOKENS)
    rope = Rope.from_config(config.to_dict())
    torch.testing.assert_close(rope.inv_freq, rotary.inv_freq)
    moved = rope.rerotate(rotated(keys, old, rotary), old, new)
    torch.testing.assert_close(moved, rotated(keys, new, rotary), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(moved, rotated(keys, old, rotary), atol=1e-2)


def test_partial_rotary_moves_only_the_leading_dims() -> None:
    config = StableLmConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )
    rotary = StableLmRotaryEmbedding(config)
    keys, old, new = torch.randn(HEADS, TOKENS, HEAD_DIM), torch.arange(TOKENS) + 9, torch.arange(TOKENS)
    rope = Rope.from_config(config.to_dict())
    assert rope.rotary_dim == HEAD_DIM // 4
    cached = rotated(keys, old, rotary)
    moved = rope.rerotate(cached, old, new)
    torch.testing.assert_close(moved, rotated(keys, new, rotary), atol=1e-4, rtol=1e-4)
    assert torch.equal(moved[..., rope.rotary_dim :], cached[..., rope.rotary_dim :])


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_older_config_style_gives_the_same_frequencies(name: str) -> None:
    config = llama_config(ROPES[name]).to_dict()
    parameters = dict(config.pop("rope_parameters"))
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {**parameters, "type": parameters.pop("rope_type")}
    new_style = Rope.from_config(llama_config(ROPES[name]).to_dict())
    assert torch.equal(Rope.from_config(config).inv_freq, new_style.inv_freq)


def test_heads_move_independently() -> None:
    config = llama_config(ROPES["default"])
    rope, rotary = Rope.from_config(config.to_dict()), LlamaRotaryEmbedding(config)
    keys = torch.randn(HEADS, 6, HEAD_DIM)
    old = torch.stack([torch.randperm(64)[:6].sort().values for _ in range(HEADS)])
    cached = torch.stack([rotated(keys[h : h + 1], old[h], rotary)[0] for h in range(HEADS)])
    moved = rope.rerotate(cached, old, torch.arange(6))
    torch.testing.assert_close(moved, rotated(keys, torch.arange(6), rotary), atol=1e-4, rtol=1e-4)


def test_bfloat16_is_cast_only_once() -> None:
    rope = Rope.from_config(llama_config(ROPES["default"]).to_dict())
    keys = (3 * torch.randn(HEADS, TOKENS, HEAD_DIM)).bfloat16()
    old, new = torch.arange(TOKENS) + 100, torch.arange(TOKENS)
    moved = rope.rerotate(keys, old, new)
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, rope.rerotate(keys.float(), old, new).bfloat16())
    assert torch.equal(rope.rerotate(keys, old, old), keys)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "layer types"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1]}}, "mrope"),
        ({"model_type": "cohere2"}, "interleaved"),
        ({"rope_interleave": True}, "interleaved"),
        ({"kv_lora_rank": 64}, "latent"),
        ({"no_rope_layers": [1, 0]}, "without RoPE"),
        ({"rope_parameters": None}, "rope_theta"),
    ],
)
def test_other_rotations_are_refused(change: dict[str, Any], reason: str) -> None:
    config = {**llama_config(ROPES["default"]).to_dict(), **change}
    with pytest.raises(UnsupportedLayout, match=reason):
        Rope.from_config(config)


def test_a_whole_row_of_heads_is_not_one_key() -> None:
    rope = Rope.from_config(llama_config(ROPES["default"]).to_dict())
    with pytest.raises(GeometryMismatch, match="one head has 16"):
        rope.rerotate(torch.zeros(3, HEADS * HEAD_DIM), 0, 1)


def cached_keys(model: Any, tokens: torch.Tensor, first_position: int) -> torch.Tensor:
    """``[L, H, T, head_dim]`` as the model caches them when the tokens start at `first_position`."""
    cache = DynamicCache()
    positions = torch.arange(first_position, first_position + tokens.shape[1])[None]
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        model(input_ids=tokens, position_ids=positions, use_cache=True, **{argument: cache})
    return torch.stack([layer.keys[0] for layer in cache.layers])


@pytest.mark.parametrize("family", [*sorted(INTERLEAVED), "llama", "smollm3"])
def test_moving_a_whole_models_keys_equals_its_forward_at_other_positions(family: str) -> None:
    """RoPE is relative: shifting all positions alike changes the keys of every layer by that rotation alone."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=4 * HEAD_DIM,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(1, 64, (1, 12))
    rope = Rope.from_config(model.config.to_dict())
    here, there = cached_keys(model, tokens, 0), cached_keys(model, tokens, 90)
    moved = rope.rerotate(there, torch.arange(90, 102), torch.arange(12))
    torch.testing.assert_close(moved, here, atol=2e-4, rtol=1e-3)
    assert rope.interleaved == (family in INTERLEAVED)
    still = [torch.allclose(a, b, atol=1e-3) for a, b in zip(here, there, strict=True)]
    assert still == [family == "smollm3" and layer == 3 for layer in range(5)]
    assert all(torch.equal(moved[layer], there[layer]) for layer in range(5) if still[layer])


def test_layers_without_rope_are_found_in_either_config_style() -> None:
    config = {"model_type": "smollm3", "head_dim": 8, "rope_theta": 1e4, "num_hidden_layers": 8}
    listed = Rope.from_config({**config, "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0]})
    assert torch.equal(listed.inv_freq, Rope.from_config(config).inv_freq)
    assert listed.inv_freq.shape == (8, 4)
    assert not listed.inv_freq[[3, 7]].any()
    assert Rope.from_config({**config, "no_rope_layers": [1] * 8}).inv_freq.shape == (4,)
    with pytest.raises(GeometryMismatch, match="do not start with the 8 layers"):
        listed.rerotate(torch.zeros(2, 5, 8), 0, 1)
