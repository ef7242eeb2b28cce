from pathlib import Path

import pytest
import torch

from kvdata.edits.policies import Learned, Source
from kvdata.edits.rope import Rope
from kvdata.errors import GeometryMismatch, InvalidRequest
from kvdata.models.attention_signals import SIGNALS, attention_signals, smoothed
from kvdata.models.losses import sample_tokens, scorer_loss, top_k_overlap, variance_explained
from kvdata.models.query_predictor import QueryPredictor
from kvdata.models.token_scorer import TokenScorer

LAYERS, HEADS, HEAD_DIM, TOKENS = 2, 2, 8, 64
ROPE = Rope.from_config({"head_dim": HEAD_DIM, "rope_theta": 10000.0})


@pytest.fixture
def scorer() -> TokenScorer:
    torch.manual_seed(0)
    return TokenScorer(LAYERS, HEADS, 2 * HEADS, HEAD_DIM, ROPE, width=16, dropout=0.0)


def make_kv(batch: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, LAYERS, TOKENS, HEADS * HEAD_DIM, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_have_one_value_per_layer_head_and_token(scorer: TokenScorer, dtype: torch.dtype) -> None:
    scores = scorer(make_kv(3, dtype))
    assert scores.shape == (3, LAYERS, HEADS, TOKENS)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


def test_a_sample_of_tokens_scores_as_in_the_whole(scorer: TokenScorer) -> None:
    kv = make_kv(2)
    tokens = torch.tensor([3, 10, 63])
    torch.testing.assert_close(scorer(kv, tokens), scorer(kv)[..., tokens], atol=1e-5, rtol=1e-4)


def make_queries(seed: int = 7) -> torch.Tensor:
    return torch.randn(LAYERS, 2 * HEADS, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def test_samples_of_a_batch_are_independent(scorer: TokenScorer) -> None:
    scorer.prepare([(make_kv(1)[0], make_queries())])
    kv = make_kv(3, seed=4)
    torch.testing.assert_close(scorer(kv)[1:2], scorer(kv[1:2]), atol=1e-5, rtol=1e-4)


def test_signals_that_are_kept_give_the_same_scores(scorer: TokenScorer) -> None:
    scorer.prepare([(make_kv(1)[0], make_queries())])
    kv = make_kv(2, seed=4)
    assert torch.equal(scorer(kv, None, scorer.signals(kv)), scorer(kv))


def test_preparing_standardises_the_features(scorer: TokenScorer) -> None:
    kv = 7 * make_kv(2) + 3
    assert not scorer.calibrated
    scorer.prepare(zip(kv, (make_queries(1), make_queries(2)), strict=True))
    assert scorer.calibrated
    features = scorer._features(kv, None, scorer.signals(kv))[0].flatten(1, 2)
    standard = (features - scorer.mean) / scorer.std
    assert standard.mean().abs() < 1e-3
    varying = features.std(dim=1) > 0.05
    torch.testing.assert_close(standard.std(dim=1)[varying].mean(), torch.tensor(1.0), atol=0.02, rtol=0)


def test_an_untrained_scorer_follows_the_attention_of_the_predicted_queries(scorer: TokenScorer) -> None:
    """One key that all queries point at must be scored first in its head, whatever the rest holds."""
    kv, queries = make_kv(1)[0], torch.zeros(LAYERS, 2 * HEADS, TOKENS, HEAD_DIM)
    kv[0, :, 20] = 0
    kv[0, :, 20, HEAD_DIM - 1] = 9.0  # the slowest dim of the rotation
    queries[:, :2, :, HEAD_DIM - 1] = 9.0
    torch.nn.init.zeros_(scorer.weight2)
    scorer.prepare([(kv, queries)])
    assert (scorer(kv[None])[0, :, 0, 4:-8].argmax(-1) == 20 - 4).all()


def test_learns_which_tokens_matter(scorer: TokenScorer) -> None:
    """Tokens whose values point one way are attended: a rule in the values of one head must be found."""

    def rule(kv: torch.Tensor) -> torch.Tensor:
        heads = kv[:, 1].unflatten(-1, (HEADS, HEAD_DIM))
        return (2 * heads[..., 0]).exp().transpose(-1, -2)

    scorer.prepare([(make_kv(1)[0], make_queries())])
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        kv = make_kv(4, seed=step)
        loss = scorer_loss(scorer(kv), rule(kv), sinks=2, window=4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    held_out = make_kv(2, seed=1000)
    scores, target = scorer.eval()(held_out), rule(held_out)
    best = target.topk(8).indices
    found = scores.topk(8).indices
    hits = (best.unsqueeze(-1) == found.unsqueeze(-2)).any(-1).float().mean()
    assert hits > 0.7


def test_loss_is_cross_entropy_between_sinks_and_window() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, LAYERS, HEADS, TOKENS, generator=generator)
    target = torch.rand(2, LAYERS, HEADS, TOKENS, generator=generator)
    free = slice(4, TOKENS - 10)
    expected = torch.nn.functional.cross_entropy(
        scores[..., free].reshape(-1, TOKENS - 14),
        (target[..., free] / target[..., free].sum(-1, keepdim=True)).reshape(-1, TOKENS - 14),
    )
    torch.testing.assert_close(scorer_loss(scores, target, sinks=4, window=10), expected)
    changed = target.clone()
    changed[..., :4] = 100
    changed[..., -10:] = 100
    torch.testing.assert_close(scorer_loss(scores, changed, sinks=4, window=10), expected)
    # the right distribution has the least loss
    assert scorer_loss(target.log(), target) < scorer_loss(scores, target)
    with pytest.raises(GeometryMismatch):
        scorer_loss(scores[..., :-1], target)


def test_sampled_tokens_lie_between_sinks_and_window() -> None:
    tokens = sample_tokens(100, 30, sinks=4, window=32, generator=torch.Generator().manual_seed(0))
    assert len(set(tokens.tolist())) == 30
    assert tokens.min() >= 4
    assert tokens.max() < 68
    assert (tokens.diff() > 0).all()
    assert sample_tokens(100, 1000).tolist() == list(range(4, 68))


def test_save_and_load(scorer: TokenScorer, tmp_path: Path) -> None:
    kv = make_kv(2)
    scorer.prepare([(kv[0], make_queries())])
    scorer.save(tmp_path / "scorer.pt")
    loaded = TokenScorer.load(tmp_path / "scorer.pt")
    assert not loaded.training
    assert torch.equal(loaded(kv), scorer.eval()(kv))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no tensors")
    with pytest.raises(InvalidRequest, match="no file of a trained module"):
        TokenScorer.load(tmp_path / "text.pt")
    torch.save({"kind": "token scorer", "version": 99}, tmp_path / "other.pt")
    with pytest.raises(InvalidRequest, match="version"):
        TokenScorer.load(tmp_path / "other.pt")


def test_another_models_cache_is_refused(scorer: TokenScorer) -> None:
    with pytest.raises(GeometryMismatch, match="the scorer takes"):
        scorer(make_kv(1)[:, :, :1])
    with pytest.raises(GeometryMismatch, match="the scorer takes"):
        scorer(make_kv(1)[0])


def test_is_a_policy(scorer: TokenScorer) -> None:
    kv = make_kv(1)[0]
    scores = Learned(scorer.eval()).scores(kv, HEADS, Source())
    assert torch.equal(scores, scorer(kv[None])[0])


def test_explained_variance_and_overlap() -> None:
    generator = torch.Generator().manual_seed(3)
    target = torch.rand(2, LAYERS, HEADS, TOKENS, generator=generator)
    noise = torch.rand(2, LAYERS, HEADS, TOKENS, generator=generator)
    torch.testing.assert_close(variance_explained(3 * target.log() - 1, target), torch.ones(LAYERS))
    assert (variance_explained(noise, target) < 0.2).all()
    log = target.log()
    mixed = variance_explained(log + log.roll(1, 0), target)[0]
    x, y = (log + log.roll(1, 0))[:, 0, :, 4:-32], log[:, 0, :, 4:-32]
    want = [torch.corrcoef(torch.stack((x[b, h], y[b, h])))[0, 1] ** 2 for b in range(2) for h in range(HEADS)]
    torch.testing.assert_close(mixed, torch.stack(want).mean())
    assert top_k_overlap(target, target, 46, sinks=4, window=32) == 1
    assert top_k_overlap(-target, target, 46, sinks=4, window=32) == 0
    ranks = torch.arange(TOKENS, dtype=torch.float32).expand(1, 1, 1, -1)
    # of the free tokens 4 to 31 the scores choose 22 to 31, the oracle 17 to 26
    assert top_k_overlap(ranks, -(ranks - 21.6).abs(), 46) == 0.5


def test_predicted_queries_are_exact_where_they_are_linear_in_the_cache() -> None:
    torch.manual_seed(2)
    predictor = QueryPredictor(LAYERS, HEADS, 2 * HEADS, HEAD_DIM, ROPE)
    mixing = torch.randn(LAYERS, 2 * HEADS * HEAD_DIM, 2 * HEADS * HEAD_DIM)

    def queries(kv: torch.Tensor) -> torch.Tensor:
        heads = kv.unflatten(-1, (HEADS, HEAD_DIM))
        plain = ROPE.rerotate(heads[0], torch.arange(TOKENS)[:, None], 0)
        hidden = torch.cat((plain.flatten(-2), heads[1].flatten(-2)), -1)
        return (hidden @ mixing + 1).unflatten(-1, (2 * HEADS, HEAD_DIM)).transpose(1, 2)

    predictor.fit((kv, queries(kv)) for kv in make_kv(20))
    unseen = make_kv(1, seed=9)
    found = predictor(unseen, torch.tensor([0, 7, 50]))
    assert found.shape == (LAYERS, 1, 2 * HEADS, 3, HEAD_DIM)
    torch.testing.assert_close(found[:, 0], queries(unseen[0])[:, :, [0, 7, 50]], atol=0.05, rtol=0.05)
    with pytest.raises(InvalidRequest, match="at least one"):
        predictor.fit([])
    with pytest.raises(GeometryMismatch):
        predictor.fit([(make_kv(1)[0], torch.zeros(LAYERS, 2, TOKENS, HEAD_DIM))])


def test_signals_against_plain_attention() -> None:
    torch.manual_seed(4)
    predictor = QueryPredictor(LAYERS, HEADS, 2 * HEADS, HEAD_DIM, ROPE)
    predictor.weight.normal_(std=0.2)
    kv = make_kv(1)
    found = attention_signals(kv, predictor, ROPE, HEADS)
    assert found.shape == (LAYERS, 1, HEADS, TOKENS, len(SIGNALS))
    places = torch.arange(TOKENS)
    queries = predictor(kv, places)[1, 0, 2:4]  # layer 1, the group of KV head 1
    keys = kv[0, 0, 1].unflatten(-1, (HEADS, HEAD_DIM))[:, 1]
    own = ROPE.rerotate(queries, 0, places) @ keys.T / HEAD_DIM**0.5
    own = own.masked_fill(places > places[:, None], -torch.inf).softmax(-1)
    every = own[:, 4::8]
    want = {
        "received max": every.amax(1).mean(0),
        "received mean": torch.stack([every[:, (places[4::8] >= t)].sum(1)[:, t].mean() for t in range(TOKENS)])
        / torch.stack([(places[4::8] >= t).sum().clamp_min(1) for t in range(TOKENS)]),
        "half window mean": own[:, 32:].mean((0, 1)),  # the window is 64 tokens, here all
        "future of window max": (ROPE.rerotate(queries, 0, TOKENS + 2 * places) @ keys.T / HEAD_DIM**0.5)
        .softmax(-1)
        .amax(1)
        .mean(0),
    }
    for name, value in want.items():
        got = found[1, 0, 1, :, SIGNALS.index(name)]
        torch.testing.assert_close(got, value.clamp_min(1e-8).log(), atol=1e-4, rtol=1e-4)
    once = smoothed(found, 5)[1, 0, 1, 10, 0]
    torch.testing.assert_close(once, found[1, 0, 1, 8:13, 0].exp().mean().log())
