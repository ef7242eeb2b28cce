import pytest
import torch

from kvdata.edits.policies import (
    RKV,
    TOVA,
    TRAINING_FREE,
    Compaction,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    Learned,
    Oracle,
    Policy,
    Random,
    Recency,
    Sees,
    SnapKV,
    SnapKVQuestion,
    Source,
    ValueNorm,
    ValueRefit,
    apply_policy,
)
from kvdata.edits.policies.queries import QueryPolicy, redundancy
from kvdata.edits.policies.refit import asked_later, denser_at_the_end, evenly_spaced, refit
from kvdata.edits.rope import Rope
from kvdata.edits.selection import compact, gather, relocate, select
from kvdata.errors import GeometryMismatch, InvalidRequest

LAYERS, HEADS, TOKENS, HEAD_DIM = 2, 3, 60, 8
QUERY_HEADS = 2 * HEADS
ROPE = Rope.from_config({"head_dim": HEAD_DIM, "rope_theta": 10000.0})
TARGET = torch.rand(LAYERS, HEADS, TOKENS, generator=torch.Generator().manual_seed(5))
QUERIES = torch.randn(LAYERS, QUERY_HEADS, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(6))
QUESTION = torch.randn(LAYERS, QUERY_HEADS, 5, HEAD_DIM, generator=torch.Generator().manual_seed(7))
SOURCE = Source(tokens=list(range(TOKENS)), index=3, queries=QUERIES, question=QUESTION, target=TARGET)


def value_norm_scorer(kv: torch.Tensor) -> torch.Tensor:
    return kv[:, 1].unflatten(-1, (HEADS, HEAD_DIM)).norm(dim=-1).transpose(-1, -2)


ASKING: tuple[QueryPolicy, ...] = (
    SnapKV(ROPE, window=8),
    SnapKVQuestion(ROPE),
    TOVA(ROPE),
    ExpectedAttention(ROPE, future=16),
    RKV(ROPE),
    Compaction(ROPE, references=24),
)
POLICIES: tuple[Policy, ...] = (*TRAINING_FREE, *ASKING, Learned(value_norm_scorer), Oracle())


@pytest.fixture
def kv() -> torch.Tensor:
    return torch.randn(2, LAYERS, TOKENS, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_policy_shares_selection_and_rotation(policy: Policy, kv: torch.Tensor, dtype: torch.dtype) -> None:
    kv = kv.to(dtype)
    scores = policy.scores(kv, HEADS, SOURCE)
    assert scores.shape == (LAYERS, HEADS, TOKENS)
    assert scores.dtype == torch.float32
    compressed, kept = apply_policy(policy, kv, 30, ROPE, HEADS, SOURCE, sinks=4, window=8)
    assert torch.equal(kept, select(scores, 30, sinks=4, window=8))
    dropped = compact(kv, kept, ROPE)
    assert torch.equal(compressed[0], dropped[0])
    assert torch.equal(compressed[1], dropped[1]) != isinstance(policy, Compaction)  # which moves values
    assert compressed.shape == (2, LAYERS, 30, HEADS * HEAD_DIM)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_policy_keeps_everything_when_allowed(policy: Policy, kv: torch.Tensor) -> None:
    compressed, _ = apply_policy(policy, kv, TOKENS, ROPE, HEADS, SOURCE)
    assert torch.equal(compressed, kv)


def test_names_are_unique_and_flags_are_right() -> None:
    assert len({policy.name for policy in POLICIES}) == len(POLICIES)
    assert [policy.name for policy in POLICIES if policy.trained] == ["learned"]
    by_sight = {sees: [policy.name for policy in POLICIES if policy.sees is sees] for sees in Sees}
    assert by_sight[Sees.QUERIES] == ["snapkv", "tova", "expected-attention", "r-kv", "compaction"]
    assert by_sight[Sees.QUESTION] == ["snapkv-question"]
    assert by_sight[Sees.FUTURE] == ["oracle"]


def test_random_is_a_function_of_sample_and_seed(kv: torch.Tensor) -> None:
    def draw(source: Source, seed: int = 0) -> torch.Tensor:
        return Random(seed).scores(kv, HEADS, source)

    first = draw(Source(index=1))
    torch.manual_seed(99)
    assert torch.equal(first, draw(Source(index=1)))
    assert not torch.equal(first, draw(Source(index=2)))
    assert not torch.equal(first, draw(Source(index=1), seed=1))
    assert torch.equal(draw(Source(tokens=[1, 2])), draw(Source(tokens=[1, 2])))
    assert not torch.equal(draw(Source(tokens=[1, 2])), draw(Source(tokens=[2, 1])))
    with pytest.raises(InvalidRequest, match="repeatable"):
        draw(Source())


def test_recency_keeps_sinks_and_the_end(kv: torch.Tensor) -> None:
    _, kept = apply_policy(Recency(), kv, 20, ROPE, HEADS, sinks=4, window=8)
    assert kept[1, 2].tolist() == [0, 1, 2, 3, *range(TOKENS - 16, TOKENS)]


def test_key_norm_prefers_small_keys(kv: torch.Tensor) -> None:
    kv[0, :, 25] *= 0.01
    assert (KeyNorm().scores(kv, HEADS, SOURCE).argmax(-1) == 25).all()


def test_keydiff_prefers_the_odd_key_out(kv: torch.Tensor) -> None:
    kv[0] = 5.0 + 0.1 * kv[0]
    kv[0, :, 31] *= -1
    scores = KeyDiff().scores(kv, HEADS, SOURCE)
    assert (scores.argmax(-1) == 31).all()
    # only directions count
    torch.testing.assert_close(KeyDiff().scores(kv * 7, HEADS, SOURCE), scores)


def test_value_norm_prefers_large_values(kv: torch.Tensor) -> None:
    kv[1, :, 25] *= 100
    assert (ValueNorm().scores(kv, HEADS, SOURCE).argmax(-1) == 25).all()


def asked_by(queries: torch.Tensor, kv: torch.Tensor, token: int, positions: torch.Tensor) -> None:
    """Make a token's key of KV head 1 what query heads 2 and 3 look for from these positions; no other key is alike."""
    wanted = ROPE.rerotate(queries[:, 2:4], 0, positions).mean((1, 2))  # [L, head_dim]
    kv[0, :, token, HEAD_DIM : 2 * HEAD_DIM] = 20 * torch.nn.functional.normalize(wanted, dim=-1)


@pytest.mark.parametrize(
    ("policy", "queries"),
    [
        (SnapKV(ROPE, window=8, kernel=1), slice(TOKENS - 8, TOKENS)),
        (TOVA(ROPE), slice(TOKENS - 1, TOKENS)),
        (RKV(ROPE, kernel=1, importance=0.9), slice(TOKENS - 8, TOKENS)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_last_queries_decide(policy: Policy, queries: slice, kv: torch.Tensor) -> None:
    asked_by(QUERIES[:, :, queries], kv, 21, torch.arange(TOKENS)[queries])
    before = policy.scores(kv, HEADS, SOURCE)[:, 1, : queries.start]
    assert (before.argmax(-1) == 21).all()
    moved = kv.clone()  # as good as before, but for queries that nobody asks from there
    moved[0] = ROPE.rerotate(kv[0].unflatten(-1, (HEADS, -1)).transpose(1, 2), 0, 30).transpose(1, 2).flatten(-2)
    assert not torch.allclose(policy.scores(moved, HEADS, SOURCE)[:, 1, : queries.start], before)


def test_the_observed_tokens_are_kept(kv: torch.Tensor) -> None:
    for policy, window in ((SnapKV(ROPE, window=8), 8), (TOVA(ROPE), 1), (RKV(ROPE), 8)):
        order = policy.scores(kv, HEADS, SOURCE).argsort(dim=-1, descending=True)
        assert (order[..., :window] >= TOKENS - window).all()
        short = Source(queries=QUERIES[:, :, :window])
        with pytest.raises(InvalidRequest, match="observes"):
            policy.scores(kv[:, :, :window], HEADS, short)


def test_the_question_decides(kv: torch.Tensor) -> None:
    asked_by(QUESTION, kv, 21, torch.arange(TOKENS, TOKENS + 5))
    policy = SnapKVQuestion(ROPE, kernel=1)
    assert (policy.scores(kv, HEADS, SOURCE)[:, 1].argmax(-1) == 21).all()
    assert torch.equal(policy.scores(kv, HEADS, Source(question=QUESTION)), policy.scores(kv, HEADS, SOURCE))


def test_snapkv_is_a_slow_plain_computation(kv: torch.Tensor) -> None:
    """Head by head and query by query, each query head with the KV head that its group shares."""
    scores = SnapKV(ROPE, window=8, kernel=3).scores(kv, HEADS, SOURCE)
    for layer in range(LAYERS):
        for head in range(HEADS):
            keys = kv[0, layer, :, head * HEAD_DIM : (head + 1) * HEAD_DIM]
            seen = torch.zeros(TOKENS - 8)
            for query_head in (2 * head, 2 * head + 1):
                for place in range(TOKENS - 8, TOKENS):
                    query = ROPE.rerotate(QUERIES[layer, query_head, place], 0, place)
                    attention = (keys[: place + 1] @ query / HEAD_DIM**0.5).softmax(0)
                    seen += attention[: TOKENS - 8] / 16
            padded = torch.cat((torch.zeros(1), seen, torch.zeros(1)))
            smooth = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
            torch.testing.assert_close(scores[layer, head, : TOKENS - 8], smooth)


def test_expected_attention_is_the_mean_over_normal_queries(kv: torch.Tensor) -> None:
    """With one future position, by sampling queries of the same mean and covariance."""
    policy = ExpectedAttention(ROPE, future=1, sinks=0)
    draws = torch.randn(200_000, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    scores = policy.scores(kv, HEADS, SOURCE)
    for head in range(HEADS):
        keys, values = (part[0, :, head * HEAD_DIM : (head + 1) * HEAD_DIM] for part in kv)
        expected = torch.zeros(TOKENS)
        for query_head in (2 * head, 2 * head + 1):
            queries = ROPE.rerotate(QUERIES[0, query_head], 0, TOKENS)
            root = torch.linalg.cholesky(torch.cov(queries.T, correction=0))
            mass = ((queries.mean(0) + draws @ root.T) @ keys.T / HEAD_DIM**0.5).exp().mean(0)
            expected += mass / mass.sum() / 2
        torch.testing.assert_close(scores[0, head], expected * values.norm(dim=-1), rtol=0.1, atol=0)


def test_expected_attention_keeps_sinks_and_counts_value_norms(kv: torch.Tensor) -> None:
    policy = ExpectedAttention(ROPE, future=16)
    scores = policy.scores(kv, HEADS, SOURCE)
    assert (scores.argsort(dim=-1, descending=True)[..., :4] < 4).all()
    kv[1, :, 30] *= 3
    torch.testing.assert_close(policy.scores(kv, HEADS, SOURCE)[..., 30], 3 * scores[..., 30])


def test_expected_attention_knows_layers_without_rope(kv: torch.Tensor) -> None:
    rope = Rope(torch.stack((ROPE.inv_freq, torch.zeros_like(ROPE.inv_freq))), HEAD_DIM)
    scores = ExpectedAttention(rope, future=16).scores(kv, HEADS, SOURCE)
    torch.testing.assert_close(scores[0], ExpectedAttention(ROPE, future=16).scores(kv, HEADS, SOURCE)[0])
    unturned = ExpectedAttention(Rope(torch.zeros_like(ROPE.inv_freq), HEAD_DIM)).scores(kv, HEADS, SOURCE)
    torch.testing.assert_close(scores[1], unturned[1])


def test_r_kv_keeps_the_last_of_several_equal_keys(kv: torch.Tensor) -> None:
    kv[0, :, [10, 20, 30]] = kv[0, :, [20]]
    scores = RKV(ROPE, importance=0.0, threshold=0.95).scores(kv, HEADS, SOURCE)
    assert (scores[..., 30] > scores[..., 20]).all()
    assert (scores[..., 30] > scores[..., 10]).all()


def test_r_kv_is_a_slow_plain_computation(kv: torch.Tensor) -> None:
    scores = RKV(ROPE, window=4, kernel=1).scores(kv, HEADS, SOURCE)
    for head in range(HEADS):
        keys = kv[0, 0, :, head * HEAD_DIM : (head + 1) * HEAD_DIM]
        charged = torch.zeros(TOKENS)
        for one in range(TOKENS):
            similar = torch.cosine_similarity(keys, keys[one : one + 1])
            similar[one] = 0
            alike = (similar > 0.5).nonzero()
            if len(alike):
                similar[alike[-1]] = 0
            charged += similar
        attention = torch.zeros(TOKENS - 4)
        for place in range(TOKENS - 4, TOKENS):
            queries = ROPE.rerotate(QUERIES[0, 2 * head : 2 * head + 2, place], 0, place)
            logits = torch.maximum(*(keys[: TOKENS - 4] @ query / HEAD_DIM**0.5 for query in queries))
            attention += logits.softmax(0) / 4
        expected = 0.1 * attention - 0.9 * (charged / TOKENS).softmax(0)[: TOKENS - 4]
        torch.testing.assert_close(scores[0, head, : TOKENS - 4], expected)
        torch.testing.assert_close(redundancy(keys[None], 0.5, rows=7)[0], (charged / TOKENS).softmax(0))


def outputs(policy: Compaction, kv: torch.Tensor, start: int) -> torch.Tensor:
    """What the reference queries, asked from `start` on, read from a cache: ``[L, H, G * R, head_dim]``."""
    asked = policy.reference_queries(torch.empty(2, LAYERS, TOKENS, 1), SOURCE, start)
    keys, values = (part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for part in kv)
    logits = asked.unflatten(1, (HEADS, -1)) @ keys[:, :, None].mT / HEAD_DIM**0.5
    return (logits.softmax(-1) @ values[:, :, None]).flatten(2, 3)


def test_compaction_reads_more_like_the_full_cache_than_dropping(kv: torch.Tensor) -> None:
    policy = Compaction(ROPE, references=24)
    full = outputs(policy, kv, TOKENS)
    compacted, kept = apply_policy(policy, kv, 30, ROPE, HEADS, SOURCE, window=8)
    errors = [
        (outputs(policy, cache, 30) - full).square().mean((-1, -2)) for cache in (compacted, compact(kv, kept, ROPE))
    ]
    assert (errors[0] < 0.5 * errors[1]).all()  # in every layer and head
    everything, _ = apply_policy(policy, kv, TOKENS, ROPE, HEADS, SOURCE)
    assert torch.equal(outputs(policy, everything, TOKENS), full)


def test_compaction_keeps_what_reference_queries_attend_to(kv: torch.Tensor) -> None:
    policy = Compaction(ROPE, references=TOKENS, future=1)
    asked_by(QUERIES, kv, 21, torch.full((TOKENS,), TOKENS))
    assert (policy.scores(kv, HEADS, SOURCE)[:, 1].argmax(-1) == 21).all()
    kept = torch.arange(20).expand(LAYERS, HEADS, -1)
    assert torch.equal(policy.merge(kv, kept, SOURCE)[0], gather(kv, kept)[0])


def test_a_refit_for_predicted_queries_is_that_of_compaction(kv: torch.Tensor) -> None:
    """The same queries, the same choice, the same values: only who knows the queries differs."""

    def predicted(caches: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        assert torch.equal(caches[0], kv)
        assert torch.equal(tokens, denser_at_the_end(TOKENS, 24))
        return QUERIES[:, None, :, evenly_spaced(TOKENS, 24)]

    compaction = Compaction(ROPE, references=24)
    expected, kept = apply_policy(compaction, kv, 30, ROPE, HEADS, SOURCE, window=8)
    scores = compaction.scores(kv, HEADS, SOURCE)[None]
    policy = Learned(lambda caches: scores, refit=ValueRefit(predicted, ROPE, 24))
    found, chosen = apply_policy(policy, kv, 30, ROPE, HEADS, window=8)
    assert torch.equal(chosen, kept)
    assert torch.equal(found[1], expected[1])


def test_a_refit_gives_what_is_kept_the_weight_of_the_whole_cache(kv: torch.Tensor) -> None:
    """Queries with much in common: attention among the slots stays, what follows them gets its share of before."""
    common = 2 + 0.2 * QUERIES
    references = common[:, :, denser_at_the_end(TOKENS, 24)]
    kept = torch.arange(0, TOKENS, 3).expand(LAYERS, HEADS, -1)
    plain = compact(kv, kept, ROPE)
    moved = relocate(ValueRefit(lambda _, at: common[:, None, :, at], ROPE, 24, future=2)(kv, kept), kept, ROPE)

    def logits(cache: torch.Tensor) -> torch.Tensor:
        keys = cache[0].unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        asked = asked_later(references, ROPE, cache.shape[2], 2).unflatten(1, (HEADS, -1)).flatten(2, 3)
        return asked @ keys.mT / HEAD_DIM**0.5

    whole, before, after = logits(kv), logits(plain), logits(moved)
    torch.testing.assert_close(after.softmax(-1), before.softmax(-1), atol=1e-5, rtol=1e-3)
    missing = [(whole.logsumexp(-1) - part.logsumexp(-1)).square().mean((0, 2)) for part in (before, after)]
    assert (missing[1] < 0.05 * missing[0]).all()


def test_references_are_denser_at_the_end() -> None:
    places = denser_at_the_end(1024, 512)
    assert len(places) == 512
    assert (places.diff() >= 0).all()
    assert places[-1] == 1023
    assert 0 <= places[0] < 8
    assert abs(int((places >= 768).sum()) - 256) <= 1
    assert denser_at_the_end(3, 512).tolist() == [1, 2, 2]


def test_refit_is_ridge_regression_towards_the_old_values() -> None:
    generator = torch.Generator().manual_seed(3)
    attention = torch.rand(1, 40, 6, generator=generator)
    values, target = (torch.randn(1, n, 4, generator=generator) for n in (6, 40))
    fitted = refit(attention, values, target, ridge=0.5).requires_grad_()
    weight = 0.5 * attention.square().sum(1).mean()
    loss = (attention @ fitted - target).square().sum() + weight * (fitted - values).square().sum()
    (gradient,) = torch.autograd.grad(loss, fitted)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-4, rtol=0)
    assert torch.equal(refit(attention, values, attention @ values, ridge=0.5), values)


@pytest.mark.parametrize("policy", ASKING, ids=lambda policy: policy.name)
def test_queries_that_are_missing_or_do_not_fit_are_refused(policy: QueryPolicy, kv: torch.Tensor) -> None:
    with pytest.raises(InvalidRequest, match="before RoPE"):
        policy.scores(kv, HEADS, Source())
    for wrong in (QUERIES[:1], QUERIES[:, :5]):
        with pytest.raises(GeometryMismatch):
            policy.scores(kv, HEADS, Source(queries=wrong, question=wrong))
    if policy.sees is Sees.QUERIES:
        with pytest.raises(GeometryMismatch):
            policy.scores(kv, HEADS, Source(queries=QUERIES[:, :, :50]))


def test_a_models_own_scale(kv: torch.Tensor) -> None:
    plain = SnapKV(ROPE, window=8).scores(kv, HEADS, SOURCE)
    assert torch.equal(SnapKV(ROPE, scale=HEAD_DIM**-0.5, window=8).scores(kv, HEADS, SOURCE), plain)
    for policy, same in (
        (SnapKV(ROPE, scale=0.1, window=8), SnapKV(ROPE, window=8)),
        (ExpectedAttention(ROPE, scale=0.1), ExpectedAttention(ROPE)),
    ):
        louder = Source(queries=QUERIES * 0.1 * HEAD_DIM**0.5)
        torch.testing.assert_close(policy.scores(kv, HEADS, SOURCE), same.scores(kv, HEADS, louder))


def test_oracle_needs_the_future(kv: torch.Tensor) -> None:
    assert torch.equal(Oracle().scores(kv, HEADS, SOURCE), TARGET)
    with pytest.raises(InvalidRequest, match="target"):
        Oracle().scores(kv, HEADS, Source(index=0))


def test_scores_of_another_shape_are_refused(kv: torch.Tensor) -> None:
    with pytest.raises(GeometryMismatch, match="broken"):
        apply_policy(Learned(lambda kv: torch.zeros(1, 5), name="broken"), kv, 50, ROPE, HEADS)
