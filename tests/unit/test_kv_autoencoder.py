"""The linear code of caches: its start, its bytes, what it keeps exactly, its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvdata.edits.rope import Rope
from kvdata.edits.selection import split_heads
from kvdata.errors import GeometryMismatch, InvalidRequest
from kvdata.models.attention_output import attention_output, attention_output_error
from kvdata.models.kv_autoencoder import KVAutoencoder
from kvdata.models.low_rank import latent_bytes, water_fill, whitened_basis
from kvdata.models.moments import Moments

LAYERS, HEADS, HEAD_DIM, TOKENS, QUERY_HEADS = 2, 2, 8, 48, 4
SIZE = HEADS * HEAD_DIM
ROPE = Rope.from_config({"head_dim": HEAD_DIM, "rope_theta": 10000.0})


def make_kv(batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Caches whose dims are correlated and of unlike scale, keys rotated."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(2, LAYERS, SIZE, SIZE, generator=torch.Generator().manual_seed(9))
    mixing = mixing * torch.linspace(2, 0.1, SIZE)[:, None]
    plain = torch.randn(batch, 2, LAYERS, TOKENS, SIZE, generator=generator) @ mixing + 1
    keys = split_heads(plain[:, 0], HEADS).transpose(-2, -3)
    plain[:, 0] = ROPE.rerotate(keys, 0, torch.arange(TOKENS)).transpose(-2, -3).flatten(-2)
    return plain.to(dtype)


def make_queries(batch: int = 2) -> torch.Tensor:
    shape = (batch, LAYERS, QUERY_HEADS, 12, HEAD_DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)) * torch.linspace(0.2, 2, HEAD_DIM)


def fitted(bits: torch.Tensor | int, sinks: int = 4, window: int = 0, group: int = 16) -> KVAutoencoder:
    """Fitted to `make_kv`; an int gives every coordinate so many bits."""
    model = KVAutoencoder(LAYERS, HEADS, HEAD_DIM, ROPE, sinks, window, group)
    moments = Moments(LAYERS, HEADS, HEAD_DIM, ROPE)
    moments.update(model.coded(make_kv()), make_queries(), torch.Generator().manual_seed(0))
    basis = whitened_basis(moments.covariance(), moments.metric())
    chosen = torch.full((2, LAYERS, SIZE), bits) if isinstance(bits, int) else bits
    model.initialise(basis, moments.mean(), chosen)
    return model.eval()


def first(rank: int, bits: int = 16) -> torch.Tensor:
    return torch.where(torch.arange(SIZE) < rank, bits, 0).expand(2, LAYERS, SIZE)


def test_the_basis_is_the_best_of_every_rank():
    x = torch.randn(500, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = x @ torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x = x - x.mean(0)
    root = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    metric = root @ root.mT
    basis = whitened_basis(x.mT @ x / len(x), metric)
    latents = x.float() @ basis.analysis
    torch.testing.assert_close(latents.var(0, correction=0), torch.ones(SIZE), atol=1e-3, rtol=0)
    for rank in (1, 5, 11, SIZE):
        rebuilt = latents[:, :rank] @ basis.synthesis[:rank]
        error = ((x.float() - rebuilt).double() @ root).square().sum() / len(x)
        # Eckart-Young: the smallest possible error of this rank, where `root` makes the metric plain distance
        best = torch.linalg.svdvals(x @ root)[rank:].square().sum() / len(x)
        torch.testing.assert_close(error, best, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(basis.spectrum[rank:].sum().double(), best, atol=1e-4, rtol=1e-3)


def test_the_start_is_the_best_code_of_values():
    kv = make_kv()
    found = fitted(first(6))(kv)
    values = kv[:, 1, 1, 4:].flatten(0, 1)
    centred = values - values.mean(0)
    left, sizes, right = torch.linalg.svd(centred, full_matrices=False)
    best = (left[:, :6] * sizes[:6]) @ right[:6] + values.mean(0)
    torch.testing.assert_close(found[:, 1, 1, 4:].flatten(0, 1), best, atol=2e-2, rtol=0)


def test_full_rank_is_exact_up_to_half_precision():
    kv = make_kv()
    torch.testing.assert_close(fitted(16)(kv), kv, atol=3e-2, rtol=0)
    worse = [(fitted(bits)(kv) - kv).square().mean() for bits in (16, 8, 4)]
    assert 0 < worse[0] < 1e-5 < worse[1] < worse[2] / 30


def test_first_and_last_tokens_stay_as_they_are():
    kv = make_kv(dtype=torch.bfloat16)
    found = fitted(first(2), sinks=3, window=5)(kv)
    assert found.dtype == kv.dtype
    assert torch.equal(found[..., :3, :], kv[..., :3, :])
    assert torch.equal(found[..., -5:, :], kv[..., -5:, :])
    changed = (found != kv).any(-1)
    assert changed[..., 3:-5].all()
    short = kv[..., :6, :]
    assert torch.equal(fitted(first(2), sinks=3, window=5)(short), short)


def mixed() -> torch.Tensor:
    """Every precision, a code with all of them, and one with nothing."""
    bits = torch.zeros(2, LAYERS, SIZE, dtype=torch.int64)
    bits[0, 0, :3], bits[0, 0, 3:8], bits[0, 0, 8:14] = 16, 8, 4
    bits[0, 1, :7] = 8
    bits[1, 1, :10] = 4
    return bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_what_was_kept_is_the_forward_pass(dtype):
    model, kv = fitted(mixed(), window=2, group=4), make_kv(dtype=dtype)
    kept = model.encode(kv)
    assert torch.equal(model.decode(kept), model(kv))
    assert len(kept.parts) == 5


def test_the_bytes_are_those_of_what_is_kept():
    model, kv = fitted(mixed(), window=2, group=4), make_kv(batch=3, dtype=torch.bfloat16)
    per_token = (2 * 3) + (5 + 4 * 2) + (3 + 4 * 2) + (7 + 4 * 2) + (5 + 4 * 3)
    assert latent_bytes(model.bits, 4) == per_token
    exact = 6 * 2 * LAYERS * SIZE * 2
    assert model.nbytes(TOKENS) == (TOKENS - 6) * per_token + exact
    assert model.encode(kv).nbytes == 3 * model.nbytes(TOKENS)
    assert model.ratio(TOKENS) == pytest.approx(model.encode(kv).nbytes / (kv.numel() * 2))


def test_bytes_go_where_they_buy_most():
    spectrum = torch.tensor([[2.0**-i for i in range(24)], [2.0 ** (-i - 8) for i in range(24)]])
    bits = water_fill(spectrum, budget=40, group=8)
    assert latent_bytes(bits, 8) <= 40 < latent_bytes(bits, 8) + 8
    assert (bits.diff(dim=-1) <= 0).all()
    assert latent_bytes(bits[:1], 8) > latent_bytes(bits[1:], 8) > 0
    assert (bits[0, 8:16] == bits[1, :8]).sum() >= 7  # equal importance, equal bits, but for packing in pairs
    assert set(water_fill(spectrum, 60, (8,)).unique().tolist()) <= {0, 8}
    assert ((water_fill(spectrum, 30, (4,)) == 4).sum(-1) % 2 == 0).all()
    assert (water_fill(spectrum, 1000) == 16).all()


def test_budgets_and_precisions_that_cannot_be_are_refused():
    with pytest.raises(InvalidRequest, match="too few"):
        water_fill(torch.ones(2, 8), 3)
    with pytest.raises(InvalidRequest, match="precisions"):
        water_fill(torch.ones(2, 8), 30, (3, 8))
    with pytest.raises(InvalidRequest, match="too few"):
        water_fill(torch.ones(2, 8), KVAutoencoder(LAYERS, HEADS, HEAD_DIM, ROPE).token_budget(0.05, 64))


def test_keys_are_coded_for_the_queries_that_read_them():
    """Dims that queries do not read must not take the coordinates of those that they do."""
    moments, plain = Moments(LAYERS, HEADS, HEAD_DIM, ROPE), torch.randn(2, LAYERS, 4, TOKENS, SIZE)
    queries = make_queries(4)
    queries[..., :] = 0
    queries[..., 3], queries[..., 7] = 2.0, -1.0  # one rotating pair: dims 3 and 7
    moments.update(plain, queries)
    basis = whitened_basis(moments.covariance(), moments.metric())
    share = basis.spectrum[0, :, : 2 * HEADS].sum(-1) / basis.spectrum[0].sum(-1)
    assert (share > 0.999).all()
    read = [h * HEAD_DIM + dim for h in range(HEADS) for dim in (3, 7)]
    decoded = plain[0] @ basis.analysis[0, :, None, :, : 2 * HEADS] @ basis.synthesis[0, :, None, : 2 * HEADS]
    torch.testing.assert_close(decoded[..., read], plain[0][..., read], atol=0.1, rtol=0)


def test_moments_do_not_depend_on_how_caches_are_batched():
    model, kv, queries = KVAutoencoder(LAYERS, HEADS, HEAD_DIM, ROPE), make_kv(4), make_queries(4)
    whole, parts = (Moments(LAYERS, HEADS, HEAD_DIM, ROPE) for _ in range(2))
    whole.update(model.coded(kv), queries)
    for rows in (slice(0, 1), slice(1, 4)):
        parts.update(model.coded(kv[rows]), queries[rows])
    torch.testing.assert_close(whole.mean(), parts.mean())
    torch.testing.assert_close(whole.covariance(), parts.covariance(), atol=1e-4, rtol=1e-4)
    keys = split_heads(kv[:, 0], HEADS).transpose(-2, -3)
    plain = ROPE.rerotate(keys, torch.arange(TOKENS), 0).transpose(-2, -3).flatten(-2)[..., 4:, :]
    torch.testing.assert_close(whole.mean()[0], plain.mean((0, 2)), atol=1e-4, rtol=1e-4)
    assert model.coded(kv).shape == (2, LAYERS, 4, TOKENS - 4, SIZE)


def test_attention_output_is_softmax_attention():
    kv, queries = make_kv(), make_queries()
    found = attention_output(kv, queries)
    keys, values = split_heads(kv, HEADS).transpose(-2, -3).repeat_interleave(2, dim=3).unbind(1)
    wanted = (queries @ keys.mT / HEAD_DIM**0.5).softmax(-1) @ values
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert attention_output_error(kv, kv, queries).abs().max() == 0
    doubled = torch.stack((kv[:, 0], 2 * kv[:, 1]), dim=1)
    torch.testing.assert_close(attention_output_error(doubled, kv, queries), torch.ones(LAYERS))


def test_save_and_load(tmp_path: Path):
    model, kv = fitted(mixed(), window=2, group=4), make_kv()
    with torch.no_grad():
        model.encoder += 0.01 * torch.randn(model.encoder.shape)
    model.save(tmp_path / "autoencoder.pt")
    loaded = KVAutoencoder.load(tmp_path / "autoencoder.pt")
    assert not loaded.training
    assert torch.equal(loaded(kv), model(kv))
    assert loaded.nbytes(99) == model.nbytes(99)


def test_other_files_are_refused(tmp_path: Path):
    torch.save({"version": 1}, tmp_path / "other.pt")
    with pytest.raises(InvalidRequest, match="not a KV autoencoder"):
        KVAutoencoder.load(tmp_path / "other.pt")


def test_another_models_cache_is_refused():
    model = fitted(8)
    for kv in (make_kv()[:, :, :1], make_kv()[0], make_kv()[..., :-1]):
        with pytest.raises(GeometryMismatch, match="the autoencoder takes"):
            model(kv)
