import pytest
import torch

from kvdata.edits.rope import Rope
from kvdata.edits.selection import compact, gather, select
from kvdata.errors import GeometryMismatch, InvalidRequest

LAYERS, HEADS, TOKENS, HEAD_DIM = 3, 2, 50, 8


@pytest.fixture
def rope() -> Rope:
    return Rope.from_config({"head_dim": HEAD_DIM, "rope_theta": 10000.0})


@pytest.fixture
def kv() -> torch.Tensor:
    return torch.randn(2, LAYERS, TOKENS, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(1))


def random_scores(seed: int = 0) -> torch.Tensor:
    return torch.randn(LAYERS, HEADS, TOKENS, generator=torch.Generator().manual_seed(seed))


def test_keeps_sinks_window_and_the_highest_scores_between() -> None:
    scores = random_scores()
    kept = select(scores, keep=20, sinks=3, window=7)
    assert kept.shape == (LAYERS, HEADS, 20)
    assert (kept.diff(dim=-1) > 0).all()
    for layer in range(LAYERS):
        for head in range(HEADS):
            middle = scores[layer, head, 3 : TOKENS - 7].topk(10).indices + 3
            expected = {0, 1, 2, *range(TOKENS - 7, TOKENS), *middle.tolist()}
            assert set(kept[layer, head].tolist()) == expected
    assert not torch.equal(kept[0, 0], kept[0, 1])


def test_one_token_set_for_all_heads_follows_mean_ranks() -> None:
    scores = random_scores()
    scores[0, 0] *= 1000  # ranks, not scales, decide
    kept = select(scores, keep=20, sinks=2, window=5, per_head=False)
    assert (kept == kept[0, 0]).all()
    ranks = scores.argsort(-1).argsort(-1).float().mean((0, 1))
    middle = ranks[2 : TOKENS - 5].topk(13).indices + 2
    assert set(kept[0, 0].tolist()) == {0, 1, *range(TOKENS - 5, TOKENS), *middle.tolist()}


def test_scores_are_not_changed() -> None:
    scores = random_scores()
    before = scores.clone()
    select(scores, keep=20, sinks=4, window=8)
    assert torch.equal(scores, before)


@pytest.mark.parametrize(
    ("keep", "sinks", "window"), [(0, 0, 0), (TOKENS + 1, 0, 0), (10, 4, 7), (10, -1, 0), (10, 0, -1)]
)
def test_impossible_budgets_are_refused(keep: int, sinks: int, window: int) -> None:
    with pytest.raises(InvalidRequest, match="keep"):
        select(random_scores(), keep, sinks=sinks, window=window)


def test_nan_scores_are_refused() -> None:
    scores = random_scores()
    scores[1, 1, 20] = torch.nan
    with pytest.raises(InvalidRequest, match="NaN"):
        select(scores, keep=20, sinks=4, window=8)


def test_gather_takes_each_heads_own_tokens(kv: torch.Tensor) -> None:
    kept = select(random_scores(), keep=9, sinks=1, window=2)
    got = gather(kv, kept).unflatten(-1, (HEADS, HEAD_DIM))
    source = kv.unflatten(-1, (HEADS, HEAD_DIM))
    for layer in range(LAYERS):
        for head in range(HEADS):
            assert torch.equal(got[:, layer, :, head], source[:, layer, kept[layer, head], head])


def test_gather_refuses_indices_of_another_model(kv: torch.Tensor) -> None:
    with pytest.raises(GeometryMismatch):
        gather(kv, torch.zeros(LAYERS + 1, HEADS, 4, dtype=torch.long))
    with pytest.raises(GeometryMismatch):
        gather(kv, torch.zeros(LAYERS, 3, 4, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropping_nothing_is_the_identity(kv: torch.Tensor, rope: Rope, dtype: torch.dtype) -> None:
    kept = select(random_scores(), keep=TOKENS, sinks=4, window=8)
    assert torch.equal(compact(kv.to(dtype), kept, rope), kv.to(dtype))


def test_compact_moves_keys_and_leaves_values(kv: torch.Tensor, rope: Rope) -> None:
    kept = select(random_scores(), keep=9, sinks=1, window=2)
    gathered, compacted = gather(kv, kept), compact(kv, kept, rope)
    assert torch.equal(compacted[1], gathered[1])
    assert torch.equal(compacted[0, :, 0], gathered[0, :, 0])  # the sink stays at position 0
    for layer in range(LAYERS):
        for head in range(HEADS):
            dims = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            expected = rope.rerotate(gathered[0, layer, :, dims], kept[layer, head], torch.arange(9))
            assert torch.equal(compacted[0, layer, :, dims], expected)
    # rotations keep norms
    norms = (tensor[0].unflatten(-1, (HEADS, HEAD_DIM)).norm(dim=-1) for tensor in (compacted, gathered))
    torch.testing.assert_close(*norms)
