import pytest
import torch

from kvdata.edits.policies import (
    TRAINING_FREE,
    KeyDiff,
    KeyNorm,
    Learned,
    Oracle,
    Policy,
    Random,
    Recency,
    Sees,
    Source,
    apply_policy,
)
from kvdata.edits.rope import Rope
from kvdata.edits.selection import compact, select
from kvdata.errors import GeometryMismatch, InvalidRequest

LAYERS, HEADS, TOKENS, HEAD_DIM = 2, 3, 60, 8
ROPE = Rope.from_config({"head_dim": HEAD_DIM, "rope_theta": 10000.0})
TARGET = torch.rand(LAYERS, HEADS, TOKENS, generator=torch.Generator().manual_seed(5))
SOURCE = Source(tokens=list(range(TOKENS)), index=3, target=TARGET)


def value_norm_scorer(kv: torch.Tensor) -> torch.Tensor:
    return kv[:, 1].unflatten(-1, (HEADS, HEAD_DIM)).norm(dim=-1).transpose(-1, -2)


POLICIES: tuple[Policy, ...] = (*TRAINING_FREE, Learned(value_norm_scorer), Oracle())


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
    assert torch.equal(compressed, compact(kv, kept, ROPE))
    assert compressed.shape == (2, LAYERS, 30, HEADS * HEAD_DIM)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_policy_keeps_everything_when_allowed(policy: Policy, kv: torch.Tensor) -> None:
    compressed, _ = apply_policy(policy, kv, TOKENS, ROPE, HEADS, SOURCE)
    assert torch.equal(compressed, kv)


def test_names_are_unique_and_flags_are_right() -> None:
    assert len({policy.name for policy in POLICIES}) == len(POLICIES)
    assert [policy.name for policy in POLICIES if policy.trained] == ["learned"]
    assert [policy.name for policy in POLICIES if policy.sees is Sees.FUTURE] == ["oracle"]


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


def test_oracle_needs_the_future(kv: torch.Tensor) -> None:
    assert torch.equal(Oracle().scores(kv, HEADS, SOURCE), TARGET)
    with pytest.raises(InvalidRequest, match="target"):
        Oracle().scores(kv, HEADS, Source(index=0))


def test_scores_of_another_shape_are_refused(kv: torch.Tensor) -> None:
    with pytest.raises(GeometryMismatch, match="broken"):
        apply_policy(Learned(lambda kv: torch.zeros(1, 5), name="broken"), kv, 50, ROPE, HEADS)
