"""The edits of `kvdata.edits.functions`: what they keep, where it is stored, and a stream that decodes from it."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdata import Connection
from kvdata.edits import functions, policies
from kvdata.edits.address import compressed_salt, source_digest
from kvdata.edits.functions import Edit, weights_revision
from kvdata.edits.policies import Source, apply_policy
from kvdata.edits.rope import Rope
from kvdata.errors import GeometryMismatch, InvalidRequest, UnsupportedLayout
from kvdata.models.kv_autoencoder import KVAutoencoder
from kvdata.models.low_rank import whitened_basis
from kvdata.models.moments import Moments
from kvdata.models.token_scorer import TokenScorer
from kvdata.sdk.batch import LMCacheBatchedStream
from kvdata.sdk.stream import DerivedEdit, TokenEvent, create_request
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv
from tests.unit.fake_engine import Engine

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": LAYOUT.num_kv_heads,
    "head_dim": LAYOUT.head_dim,
    "rope_theta": 10000.0,
}
ROPE = Rope.from_config(CONFIG)
CHUNK = 32
ASKING = ("snapkv", "tova", "expected_attention", "r_kv", "compaction")
KINDS = (
    "drop_middle_chunks",
    "random",
    "sinks_and_recency",
    "key_norm",
    "keydiff",
    "value_norm",
    *ASKING,
    "learned",
    "autoencoder",
)


def queries_of(tokens: list[int]) -> torch.Tensor:
    """Queries of 4 heads that depend on the tokens, as those of a model do."""
    generator = torch.Generator().manual_seed(sum(tokens))
    return torch.randn(LAYOUT.num_layers, 4, len(tokens), LAYOUT.head_dim, generator=generator)


def saved_scorer(path: Path, seed: int = 0, config: dict[str, Any] = CONFIG) -> Path:
    torch.manual_seed(seed)
    rope = Rope.from_config(config)
    heads = LAYOUT.num_kv_heads
    TokenScorer(LAYOUT.num_layers, heads, 2 * heads, LAYOUT.head_dim, rope, width=8).save(path)
    return path


def saved_autoencoder(path: Path, config: dict[str, Any] = CONFIG) -> Path:
    torch.manual_seed(0)
    model = KVAutoencoder(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, Rope.from_config(config))
    moments = Moments(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, Rope.from_config(config))
    moments.update(model.coded(random_kv(200)[None]), torch.randn(1, LAYOUT.num_layers, 4, 8, LAYOUT.head_dim))
    basis = whitened_basis(moments.covariance(), moments.metric())
    model.initialise(basis, moments.mean(), torch.full((2, LAYOUT.num_layers, LAYOUT.hidden), 4))
    model.save(path)
    return path


def kept(kind: str, chunks: int) -> int:
    """Tokens that an edit with default arguments keeps: half of the chunks, rounded down, or all."""
    return CHUNK * (chunks if kind == "autoencoder" else chunks // 2)


@pytest.fixture
def make(tmp_path):
    """Any of `KINDS` by name."""

    def make_edit(kind: str, **options: Any) -> Edit:
        function = getattr(functions, kind)
        if kind == "learned":
            return function(saved_scorer(tmp_path / "scorer.pt"), CONFIG, **options)
        if kind in ASKING:
            return function(CONFIG, queries_of, **options)
        if kind == "autoencoder":
            return function(saved_autoencoder(tmp_path / "autoencoder.pt"), CONFIG, **options)
        return function(CONFIG, **options)

    return make_edit


@pytest.mark.parametrize("kind", KINDS)
def test_every_edit_keeps_whole_chunks_under_a_salt_of_its_own(make, kind):
    edit, tokens, kv = make(kind), fresh_tokens(5 * CHUNK), random_kv(5 * CHUNK)
    assert isinstance(edit, DerivedEdit)
    before = kv.clone()
    edited, ids, salt = edit.derive(kv, tokens, CHUNK, "team")
    assert torch.equal(kv, before)
    assert edited.shape == (2, LAYOUT.num_layers, kept(kind, 5), LAYOUT.hidden)
    assert not torch.equal(edited, kv)
    assert edited.dtype == kv.dtype
    assert len(ids) == kept(kind, 5)
    name, revision, digest = salt.removeprefix("team~").rsplit("-", 2)
    assert name == f"{edit.method.name}.{kept(kind, 5)}"
    assert revision == edit.revision
    assert digest == source_digest(tokens)
    assert torch.equal(edit.derive(kv, tokens, CHUNK, "team")[0], edited)
    other = [*tokens[:-1], tokens[-1] + 1]
    assert edit.derive(kv, other, CHUNK, "team")[2] != salt  # ids that begin alike do not share an address


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("random", policies.Random(0)),
        ("sinks_and_recency", policies.Recency()),
        ("key_norm", policies.KeyNorm()),
        ("keydiff", policies.KeyDiff()),
        ("value_norm", policies.ValueNorm()),
        ("snapkv", policies.SnapKV(ROPE)),
        ("tova", policies.TOVA(ROPE)),
        ("expected_attention", policies.ExpectedAttention(ROPE)),
        ("r_kv", policies.RKV(ROPE)),
        ("compaction", policies.Compaction(ROPE)),
    ],
)
def test_policy_edits_are_apply_policy(make, kind, policy):
    tokens, kv = fresh_tokens(4 * CHUNK), random_kv(4 * CHUNK)
    source = Source(tokens=tokens, queries=queries_of(tokens))
    want, kept = apply_policy(policy, kv, 3 * CHUNK, ROPE, LAYOUT.num_kv_heads, source, sinks=2, window=7)
    edited, ids, _ = make(kind, keep=0.75, sinks=2, window=7).derive(kv, tokens, CHUNK, "")
    assert torch.equal(edited, want)
    assert ids == tokens[: 3 * CHUNK]
    if kind == "sinks_and_recency":
        assert kept[0, 0].tolist() == [0, 1, *range(4 * CHUNK - 94, 4 * CHUNK)]


def test_the_middle_goes_and_the_ids_go_with_it(make):
    tokens, kv = fresh_tokens(5 * CHUNK), random_kv(5 * CHUNK)
    edited, ids, salt = make("drop_middle_chunks", keep=0.6).derive(kv, tokens, CHUNK, "")
    places = [*range(2 * CHUNK), *range(4 * CHUNK, 5 * CHUNK)]
    assert ids == [tokens[place] for place in places]
    assert salt.startswith("~middle-chunks.96-r1-")
    assert torch.equal(edited[1], kv[1][:, places])
    assert torch.equal(edited[0, :, : 2 * CHUNK], kv[0, :, : 2 * CHUNK])  # these stay where they were
    assert not torch.equal(edited[0, :, 2 * CHUNK :], kv[0, :, 4 * CHUNK :])
    one, ids, _ = make("drop_middle_chunks", keep=0.01).derive(kv, tokens, CHUNK, "")
    assert torch.equal(one, kv[:, :, :CHUNK])  # never less than the first chunk
    assert ids == tokens[:CHUNK]


def tiny_engine(family: str) -> Any:
    """A `HuggingFaceEngine` of a small random model of a family."""
    transformers = pytest.importorskip("transformers")
    from kvdata.engines.huggingface import HuggingFaceEngine

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 512, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(family, **sizes, **heads, **ends)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return HuggingFaceEngine(model, model_name="tiny", kv_dtype=torch.float32)


FAMILIES = ["llama", "glm", "smollm3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_moved_keys_are_those_of_the_model_at_the_new_places(family):
    """Layer 0's keys depend on token and position alone: a prefill of the kept tokens has the very same."""
    engine, tokens = tiny_engine(family), torch.randint(3, 512, (96,)).tolist()
    edited, ids, _ = functions.drop_middle_chunks(engine.config).derive(engine.prefill(tokens), tokens, 16, "")
    assert ids == tokens[:32] + tokens[-16:]
    torch.testing.assert_close(edited[:, 0], engine.prefill(ids)[:, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_snapkv_keeps_what_the_model_itself_attends_to(family):
    engine, tokens = tiny_engine(family), torch.randint(3, 512, (96,)).tolist()
    kv = engine.prefill(tokens)
    attention = engine.attention(kv[:, :, :64], tokens[64:]).mean(-2)  # [L, Hq, 64] of the last 32 queries
    wanted = attention.unflatten(1, (2, -1)).mean(2)
    policy = policies.SnapKV(Rope.from_config(engine.config), window=32, kernel=1)
    source = Source(queries=engine.queries(tokens))
    torch.testing.assert_close(policy.scores(kv, 2, source)[..., :64], wanted, atol=1e-5, rtol=1e-3)
    edit = functions.policy_edit(policy, engine.config, queries=engine.queries)
    edited, _, salt = edit.derive(kv, tokens, 16, "")
    want, _ = apply_policy(policy, kv, 48, edit.rope, 2, source)
    assert torch.equal(edited, want)
    assert salt.startswith("~snapkv.window32.kernel1.48-r1-")


def test_whatever_changes_the_result_changes_the_address(make, tmp_path):
    tokens, kv = fresh_tokens(4 * CHUNK), random_kv(4 * CHUNK)
    edits = [
        *(make(kind) for kind in KINDS),
        make("random", seed=7),
        functions.policy_edit(policies.SnapKV(ROPE, window=16), CONFIG, queries=queries_of),
        functions.policy_edit(policies.ExpectedAttention(ROPE, epsilon=0.02), CONFIG, queries=queries_of),
        make("keydiff", keep=0.25, window=8),
        make("keydiff", keep=0.75),
        make("keydiff", sinks=1),
        make("keydiff", per_head=False),
        make("keydiff", revision="r2"),
        functions.learned(saved_scorer(tmp_path / "other.pt", seed=1), CONFIG),
    ]
    salts = [edit.derive(kv, tokens, CHUNK, "")[2] for edit in edits]
    assert len(set(salts)) == len(edits)


def test_a_checkpoints_revision_is_its_weights(tmp_path):
    first, again = (functions.learned(saved_scorer(tmp_path / name), CONFIG) for name in ("a.pt", "b.pt"))
    other = functions.learned(saved_scorer(tmp_path / "c.pt", seed=1), CONFIG)
    assert first.revision == again.revision != other.revision
    scorer = TokenScorer.load(tmp_path / "a.pt")
    assert first.revision == f"{weights_revision(scorer)}.refit"
    assert functions.learned(tmp_path / "a.pt", CONFIG, revision="mine").revision == "mine"
    tokens, kv = fresh_tokens(4 * CHUNK), random_kv(4 * CHUNK)
    policy, revision = functions.learned_policy(scorer, "w")
    want, _ = apply_policy(policy, kv, 2 * CHUNK, ROPE, 2)
    found = first.derive(kv, tokens, CHUNK, "")[0]
    assert torch.equal(found, want)
    plain, plain_revision = functions.learned_policy(scorer, "w", refit=False)
    dropped, _ = apply_policy(plain, kv, 2 * CHUNK, ROPE, 2)
    assert (revision, plain_revision) == ("w.refit", "w")
    assert not torch.equal(found[1], dropped[1])
    # The same keys, but for what is added to all of a head.
    shift = (found[0] - dropped[0]).float()
    torch.testing.assert_close(shift, shift.mean(1, keepdim=True).expand_as(shift), atol=0.05, rtol=0.05)


def test_an_autoencoder_keeps_every_token(tmp_path):
    path, tokens, kv = saved_autoencoder(tmp_path / "a.pt"), fresh_tokens(4 * CHUNK), random_kv(4 * CHUNK)
    edit = functions.autoencoder(path, CONFIG)
    edited, ids, salt = edit.derive(kv, tokens, CHUNK, "")
    model = KVAutoencoder.load(path)
    assert torch.equal(edited, model(kv[None])[0])
    assert ids == tokens
    assert salt == compressed_salt(tokens, "autoencoder.128", weights_revision(model))
    assert torch.equal(edit(kv, tokens)[0], edited)
    assert functions.autoencoder(path, CONFIG, revision="mine").revision == "mine"


def test_an_autoencoder_for_a_model_with_layers_without_rope(tmp_path):
    config = {**CONFIG, "model_type": "smollm3", "no_rope_layers": [1, 0, 1]}
    path, kv = saved_autoencoder(tmp_path / "a.pt", config), random_kv(64)
    edited, _, _ = functions.autoencoder(path, config).derive(kv, fresh_tokens(64), 16, "")
    error = (edited.float() - kv.float()).square().mean((0, 2, 3))
    assert (error < 0.1 * kv.float().square().mean((0, 2, 3))).all()
    with pytest.raises(GeometryMismatch):
        functions.autoencoder(path, CONFIG)


def test_a_checkpoint_for_a_model_with_layers_without_rope(tmp_path):
    config = {**CONFIG, "model_type": "smollm3", "no_rope_layers": [1, 0, 1]}
    path, tokens, kv = saved_scorer(tmp_path / "a.pt", config=config), fresh_tokens(64), random_kv(64)
    edited, _, _ = functions.learned(path, config, window=8).derive(kv, tokens, 16, "")
    found = edited[0, 1].unflatten(-1, (2, 8))[:, 0]  # one head of the layer that does not rotate
    assert {tuple(key.tolist()) for key in found} <= {tuple(key.tolist()) for key in kv[0, 1, :, :8]}
    with pytest.raises(GeometryMismatch):
        functions.learned(path, CONFIG)


@pytest.mark.parametrize("change", [{"rope_theta": 5e5}, {"num_key_value_heads": 4}, {"head_dim": 16}])
def test_a_checkpoint_of_another_model_is_refused(tmp_path, change):
    path = saved_scorer(tmp_path / "scorer.pt")
    with pytest.raises(GeometryMismatch, match=r"other|another"):
        functions.learned(path, {**CONFIG, **change})
    path = saved_autoencoder(tmp_path / "autoencoder.pt")
    with pytest.raises(GeometryMismatch, match=r"other|another"):
        functions.autoencoder(path, {**CONFIG, **change})


def test_wrong_arguments(make):
    with pytest.raises(InvalidRequest, match="share"):
        make("keydiff", keep=0)
    with pytest.raises(InvalidRequest, match="share"):
        make("keydiff", keep=1.5)
    with pytest.raises(InvalidRequest, match="no room"):
        make("keydiff", sinks=30).derive(random_kv(64), fresh_tokens(64), CHUNK, "")
    with pytest.raises(GeometryMismatch, match="agree in T"):
        make("keydiff").derive(random_kv(64), fresh_tokens(63), CHUNK, "")
    with pytest.raises(InvalidRequest, match=r"queries=engine\.queries"):
        functions.policy_edit(policies.TOVA(ROPE), CONFIG)
    for policy in (policies.SnapKVQuestion(ROPE), policies.Oracle()):
        with pytest.raises(InvalidRequest, match="does not have"):
            functions.policy_edit(policy, CONFIG, queries=queries_of)
    with pytest.raises(UnsupportedLayout, match="dynamic"):
        functions.keydiff({**CONFIG, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})


def test_as_a_plain_function_it_keeps_the_exact_share(make):
    edit, tokens, kv = make("keydiff"), fresh_tokens(90), random_kv(90)
    edited, ids = edit(kv, tokens)
    assert (edited.shape[2], ids) == (45, tokens[:45])
    assert torch.equal(edit({"kv": kv}, tokens)[0], edited)


@pytest.mark.parametrize("later_form", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_decodes_from_the_edited_cache(make, connection: Connection, kind, later_form):
    requests = []
    with connection.connect() as ctx:

        def engine(prompt, params, salt):
            requests.append((prompt, salt))
            yield TokenEvent(9)

        prompt, kv = fresh_tokens(4 * CHUNK + 3), random_kv(4 * CHUNK)
        ctx.store(kv, prompt[: 4 * CHUNK])
        batch = LMCacheBatchedStream(settle_seconds=0)
        batch.add(create_request([ctx] if later_form else ctx, engine, prompt))
        batch.prefill()
        edit = make(kind)
        assert batch.modify(edit).output_tokens == kept(kind, 4)
        batch.decode({"max_tokens": 1})
        sent, salt = requests[-1]
        want, ids, address = edit.derive(kv, prompt[: 4 * CHUNK], CHUNK, "")
        assert (sent, salt) == ([*ids, *prompt[-3:], 9], address)
        assert torch.equal(ctx.retrieve(sent, salt), want)
        assert torch.equal(ctx.retrieve(prompt), kv)


def test_every_public_function_is_in_the_matrix():
    public = [
        name
        for name, function in inspect.getmembers(functions, inspect.isfunction)
        if function.__module__ == functions.__name__ and function.__annotations__.get("return") == "Edit"
    ]
    assert sorted(public) == sorted([*KINDS, "policy_edit", "cartridge"])  # test_cartridge.py has the last


def test_the_example_compares_both_arms(make, connection: Connection, capsys):
    path = Path(__file__).parents[2] / "examples" / "token_dropping.py"
    spec = importlib.util.spec_from_file_location("token_dropping_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with connection.connect() as ctx:
        engine = Engine(ctx)
        gain = example.compare(ctx, engine, [fresh_tokens(4 * CHUNK + 3) for _ in range(2)], make("keydiff"), 5)
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("full: ")] == ["full:   '<0><0><1><2><3><4>'"]
    assert "tokens stored" in shown
    assert f"{gain:.2f}x" in shown
    assert sorted(len(prompt) for prompt, _, _ in engine.requests[-2:]) == [2 * CHUNK + 4] * 2
