"""Passkey prompts, and greedy decoding told by one forward."""

from __future__ import annotations

import pytest
import torch

from kvdata.edits.policies import KeyDiff, Oracle, Recency
from kvdata.edits.rope import Rope
from kvdata.errors import InvalidRequest
from kvdata.evaluation import Dropping, PasskeyRow, Rows, evaluate_passkey, passkey_prompts
from kvdata.evaluation.offline import full_key
from kvdata.evaluation.passkey import DEPTHS, SALT, Prompt, retrieves
from tests.unit.tiny_model import tiny_engine, tiny_tokenizer

engine_of_this_module = pytest.fixture(scope="module", name="engine")(tiny_engine)


def test_prompts_have_one_length_and_hide_the_number_at_their_depth():
    tokenizer = tiny_tokenizer()
    prompts = list(passkey_prompts(tokenizer, 4096, 3))
    assert len(prompts) == 15
    numbers = set()
    for prompt in prompts:
        assert len(prompt.tokens) == 4096
        text = tokenizer.decode(prompt.tokens, clean_up_tokenization_spaces=False).replace(" ", "")
        number = tokenizer.decode(prompt.answer).replace(" ", "")
        assert len(number) == 5
        assert text.count(f"Thepasskeyis{number}.Rememberit.{number}isthepasskey.") == 1
        assert text.index("Thepasskey") / len(text) == pytest.approx(prompt.depth, abs=0.05)
        assert number not in text.replace(f"Thepasskeyis{number}.Rememberit.{number}isthepasskey.", "")
        numbers.add(number)
    assert len(numbers) == 15
    assert [p.depth for p in prompts[:5]] == list(DEPTHS)
    again = list(passkey_prompts(tokenizer, 4096, 1))  # more repetitions only add prompts
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(again, prompts, strict=False))
    with pytest.raises(InvalidRequest, match="does not fit"):
        list(passkey_prompts(tokenizer, 128, 1))


def test_one_forward_tells_what_greedy_decoding_gives(engine):
    ids = torch.randint(96, (64,), generator=torch.Generator().manual_seed(3))
    kv, question = engine.prefill(ids), ids[:7]
    fed = question.tolist()
    for _ in range(4):
        fed.append(int(engine.continue_from(kv, fed)[-1].argmax()))
    answer = torch.tensor(fed[7:])
    wrong = answer.clone()
    wrong[2] = (wrong[2] + 1) % 96
    both = torch.stack((kv, kv))
    assert retrieves(engine, both, Prompt(0, 0.5, ids, question, answer)) == [True, True]
    assert retrieves(engine, both, Prompt(0, 0.5, ids, question, wrong)) == [False, False]


def test_prompts_go_through_the_server_and_are_done_once(engine, connection, tmp_path):
    prompts = list(passkey_prompts(engine.tokenizer, 192, 1))
    rope = Rope.from_config(engine.config)
    methods = [Dropping(policy, rope, 2) for policy in (Recency(), KeyDiff(), Oracle())]
    rows = Rows(tmp_path / "passkey.jsonl", PasskeyRow)
    with connection.connect() as ctx:
        before = ctx.stats()
        evaluate_passkey(engine, ctx, prompts[:2], methods, [0.5], rows)
        assert ctx.stats()["stores"] - before["stores"] == 2 * 4
        evaluate_passkey(engine, ctx, prompts, methods, [0.5], rows)
        assert ctx.stats()["stores"] - before["stores"] == 5 * 4
        assert ctx.lookup(prompts[0].tokens.tolist(), SALT) == 0
    for prompt in prompts:
        kept = {name: rows[prompt.number, name, "r1", 0.5] for name in ("recency", "keydiff", "oracle")}
        assert {row.kept_tokens for row in kept.values()} == {96}
        full = rows[full_key(prompt.number)]
        assert (full.depth, full.kept_tokens) == (prompt.depth, 192)
        assert full.found == retrieves(engine, engine.prefill(prompt.tokens)[None], prompt)[0]
