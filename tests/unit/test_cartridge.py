"""Cartridges: their slots, their file, the loss they are trained with, and the edit that stores them."""

from __future__ import annotations

import pytest
import torch

from kvdata.edits import functions
from kvdata.edits.functions import weights_revision
from kvdata.errors import GeometryMismatch, InvalidRequest, OtherSource
from kvdata.models.cartridge import Cartridge
from kvdata.models.distillation import top_k_kl, top_k_of
from kvdata.models.token_scorer import TokenScorer
from kvdata.sdk.batch import LMCacheBatchedStream
from kvdata.sdk.stream import create_request
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv
from tests.unit.fake_engine import Engine

SLOTS, DOCUMENT, VOCAB = 32, 128, 97


def begun(tokens: list[int], seed: int = 0, sinks: int = 4) -> Cartridge:
    """A cartridge of random content that has learned something random."""
    torch.manual_seed(seed)
    cartridge = Cartridge(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, SLOTS, sinks)
    cartridge.begin(random_kv(SLOTS), tokens)
    torch.nn.init.normal_(cartridge.keys)
    torch.nn.init.normal_(cartridge.values)
    return cartridge


# -- the slots -----------------------------------------------------------------------------------------


def test_it_begins_as_the_compressed_cache_and_only_the_free_slots_move():
    tokens, kv = fresh_tokens(DOCUMENT), random_kv(SLOTS)
    cartridge = Cartridge(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, SLOTS, sinks=3)
    cartridge.begin(kv, tokens)
    assert cartridge().dtype == torch.float32
    assert torch.equal(cartridge.slots_as(kv.dtype), kv)
    with torch.no_grad():
        cartridge.keys += 1
        cartridge.values -= 2
    moved = (cartridge() - kv.float()) / cartridge.scale
    assert torch.equal(moved[:, :, :3], torch.zeros_like(moved[:, :, :3]))
    torch.testing.assert_close(moved[0, :, 3:], torch.ones_like(moved[0, :, 3:]))
    torch.testing.assert_close(moved[1, :, 3:], torch.full_like(moved[1, :, 3:], -2))
    cartridge.begin(kv, tokens)
    assert torch.equal(cartridge.slots_as(kv.dtype), kv)  # what was learned is forgotten


def test_steps_are_measured_in_each_heads_own_deviation():
    kv = random_kv(SLOTS).float()
    kv[0, 1, :, : LAYOUT.head_dim] *= 10  # keys of head 0 in layer 1
    cartridge = Cartridge(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, SLOTS)
    cartridge.begin(kv, fresh_tokens(DOCUMENT))
    by_head = kv.unflatten(-1, (LAYOUT.num_kv_heads, LAYOUT.head_dim))
    want = by_head.std(dim=(2, 4))
    found = cartridge.scale.unflatten(-1, (LAYOUT.num_kv_heads, LAYOUT.head_dim))
    torch.testing.assert_close(found[:, :, 0].amin(-1), want)
    torch.testing.assert_close(found[:, :, 0].amax(-1), want)


def test_slots_of_another_shape_are_refused():
    cartridge = Cartridge(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, SLOTS)
    with pytest.raises(GeometryMismatch, match="slots"):
        cartridge.begin(random_kv(SLOTS + 1), fresh_tokens(DOCUMENT))
    with pytest.raises(InvalidRequest, match="nothing to learn"):
        Cartridge(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, slots=4, sinks=4)


def test_a_file_holds_the_slots_and_their_document(tmp_path):
    tokens = fresh_tokens(DOCUMENT)
    cartridge = begun(tokens)
    cartridge.save(tmp_path / "a.pt")
    again = Cartridge.load(tmp_path / "a.pt")
    assert torch.equal(again(), cartridge())
    assert (again.source, again.source_tokens) == (cartridge.source, DOCUMENT)
    assert weights_revision(again) == weights_revision(cartridge) != weights_revision(begun(tokens, seed=1))
    again.check(tokens)
    with pytest.raises(OtherSource, match="not for the"):
        again.check([*tokens[:-1], tokens[-1] + 1])


def test_files_of_another_kind_are_refused(tmp_path):
    begun(fresh_tokens(DOCUMENT)).save(tmp_path / "a.pt")
    with pytest.raises(InvalidRequest, match="not a token scorer"):
        TokenScorer.load(tmp_path / "a.pt")
    torch.save({"kind": "token scorer", "version": 1}, tmp_path / "b.pt")
    with pytest.raises(InvalidRequest, match="not a cartridge"):
        Cartridge.load(tmp_path / "b.pt")


# -- the loss ------------------------------------------------------------------------------------------


def test_top_k_kl_is_the_divergence_for_the_whole_vocabulary_and_below_it_for_less():
    teacher, student = torch.randn(2, 5, 7, VOCAB).mul(3)
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    full = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(top_k_kl(*top_k_of(teacher, VOCAB), student), full, atol=1e-4, rtol=1e-4)
    some, few = (top_k_kl(*top_k_of(teacher, k), student) for k in (20, 5))
    assert (few <= some + 1e-5).all()
    assert (some <= full + 1e-5).all()
    assert few.mean() > 0.3 * full.mean()
    same = top_k_kl(*top_k_of(teacher, 5), teacher)
    torch.testing.assert_close(same, torch.zeros_like(same), atol=1e-5, rtol=0)


def test_mass_beyond_the_k_is_paid_for():
    teacher = torch.zeros(VOCAB)
    teacher[:3] = 20.0
    student = teacher.clone().requires_grad_()
    with torch.no_grad():
        student[50] = 20.0  # a token that the teacher does not expect
    top_k_kl(*top_k_of(teacher, 3), student).backward()
    assert student.grad[50] > 0.1


# -- the edit ------------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": LAYOUT.num_kv_heads,
    "head_dim": LAYOUT.head_dim,
    "rope_theta": 10000.0,
}


def test_a_stream_decodes_from_its_cartridge(tmp_path, connection):
    prompt, kv = fresh_tokens(DOCUMENT + 3), random_kv(DOCUMENT)
    trained = begun(prompt[:DOCUMENT])
    trained.save(tmp_path / "a.pt")
    with connection.connect() as ctx:
        engine = Engine(ctx)
        ctx.store(kv, prompt[:DOCUMENT])
        batch = LMCacheBatchedStream(settle_seconds=0)
        batch.add(create_request(ctx, engine, prompt))
        batch.prefill()
        assert batch.modify(functions.cartridge(tmp_path / "a.pt", CONFIG)).output_tokens == SLOTS
        batch.decode({"max_tokens": 1})
        sent, _, salt = engine.requests[-1]
        assert sent[:SLOTS] == prompt[:SLOTS]
        assert salt.startswith(f"~cartridge.{SLOTS}-{weights_revision(trained)}-")
        assert torch.equal(ctx.retrieve(prompt[:SLOTS], salt), trained.slots_as(kv.dtype))
        assert torch.equal(ctx.retrieve(prompt[:DOCUMENT]), kv)


def test_it_stands_for_its_own_document_and_model_alone(tmp_path):
    tokens, kv = fresh_tokens(DOCUMENT), random_kv(DOCUMENT)
    begun(tokens).save(tmp_path / "a.pt")
    edit = functions.cartridge(tmp_path / "a.pt", CONFIG)
    assert torch.equal(edit(kv, tokens)[0], begun(tokens).slots_as(kv.dtype))
    with pytest.raises(OtherSource, match="train one for this document"):
        edit.derive(kv, [*tokens[:-1], tokens[-1] + 1], 32, "")
    with pytest.raises(InvalidRequest, match="whole number of chunks"):
        edit.derive(kv, tokens, 64, "")
    with pytest.raises(GeometryMismatch, match="another model"):
        edit.derive(kv[:, :2], tokens, 32, "")
    with pytest.raises(GeometryMismatch, match="other heads"):
        functions.cartridge(tmp_path / "a.pt", {**CONFIG, "num_key_value_heads": 4})
    Cartridge(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, SLOTS).save(tmp_path / "b.pt")
    with pytest.raises(InvalidRequest, match="no document"):
        functions.cartridge(tmp_path / "b.pt", CONFIG)
