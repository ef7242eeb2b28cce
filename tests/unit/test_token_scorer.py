from pathlib import Path

import pytest
import torch

from kvdata.edits.policies import Learned, Source
from kvdata.edits.rope import Rope
from kvdata.errors import GeometryMismatch, InvalidRequest
from kvdata.models.losses import sample_tokens, scorer_loss
from kvdata.models.token_scorer import TokenScorer

LAYERS, HEADS, HEAD_DIM, TOKENS = 2, 2, 8, 64
ROPE = Rope.from_config({"head_dim": HEAD_DIM, "rope_theta": 10000.0})


@pytest.fixture
def scorer() -> TokenScorer:
    torch.manual_seed(0)
    return TokenScorer(LAYERS, HEADS, HEAD_DIM, ROPE, width=16, dropout=0.0)


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


def test_samples_of_a_batch_are_independent(scorer: TokenScorer) -> None:
    scorer.calibrate(make_kv(2))
    kv = make_kv(3, seed=4)
    torch.testing.assert_close(scorer(kv)[1:2], scorer(kv[1:2]), atol=1e-5, rtol=1e-4)


def test_first_training_step_standardises_the_features(scorer: TokenScorer) -> None:
    kv = 7 * make_kv(4) + 3
    scorer.eval()
    scorer(kv)
    assert not scorer.calibrated
    scorer.train()
    scorer(kv)
    assert scorer.calibrated
    features = scorer._features(kv, None).flatten(1, 2)
    standard = (features - scorer.mean) / scorer.std
    assert standard.mean().abs() < 1e-3
    varying = features.std(dim=1) > 0.05
    torch.testing.assert_close(standard.std(dim=1)[varying].mean(), torch.tensor(1.0), atol=0.02, rtol=0)
    before = scorer.mean.clone()
    scorer(make_kv(4, seed=9))
    assert torch.equal(scorer.mean, before)


def test_learns_which_tokens_matter(scorer: TokenScorer) -> None:
    """Tokens whose values point one way are attended: a rule in the values of one head must be found."""

    def rule(kv: torch.Tensor) -> torch.Tensor:
        heads = kv[:, 1].unflatten(-1, (HEADS, HEAD_DIM))
        return (2 * heads[..., 0]).exp().transpose(-1, -2)

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
    scorer.calibrate(kv)
    scorer.save(tmp_path / "scorer.pt")
    loaded = TokenScorer.load(tmp_path / "scorer.pt")
    assert not loaded.training
    assert torch.equal(loaded(kv), scorer.eval()(kv))


def test_other_files_are_refused(tmp_path: Path) -> None:
    torch.save({"version": 99}, tmp_path / "other.pt")
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
