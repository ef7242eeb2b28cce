"""The same caches through an engine that serves: its scores, its reads, its throughput."""

from __future__ import annotations

import pytest
import torch

from kvdata import KVCacheDataset
from kvdata.edits.address import compressed_address
from kvdata.edits.policies import KeyDiff, Recency
from kvdata.edits.rope import Rope
from kvdata.engines.openai import openai_completion
from kvdata.errors import ProtocolError
from kvdata.evaluation import Dropping, LiveRow, LiveScorer, Rows, decode_live, live_results, score_live
from kvdata.evaluation.offline import full_key
from kvdata.sdk.stream import TokenEvent
from tests.unit.fake_vllm import MODEL, FakeVLLM, serving
from tests.unit.tiny_model import tiny_engine, windows

engine_of_this_module = pytest.fixture(scope="module", name="engine")(tiny_engine)


class Served:
    """Answers from the cache that the server holds of a prompt, and stores what it had to compute, as vLLM does."""

    def __init__(self, engine, ctx) -> None:
        self.engine, self.ctx = engine, ctx
        self.params: list[dict] = []

    def __call__(self, prompt, params, salt):
        self.params.append(params)
        kv = self.ctx.retrieve(prompt[:-1], salt)  # the last token is always computed
        self.ctx.settle()  # a chunk counts as read when its lock is released
        if kv is None:
            self.engine.store_prefix(self.ctx, prompt, salt)
            kv = self.engine.prefill(prompt[:-1])
        fed = list(prompt[kv.shape[2] :])
        for _ in range(params["max_tokens"]):
            found = self.engine.continue_from(kv, fed)[-1].float().log_softmax(-1)
            token = params.get("allowed_token_ids", [int(found.argmax())])[0]
            fed.append(token)
            yield TokenEvent(token, "", float(found[token]))


@pytest.fixture
def dataset(engine, connection):
    records = windows(2, 192, 24, 21)
    with connection.connect() as ctx:
        for record in records:
            engine.store_prefix(ctx, record["tokens"])
    data = KVCacheDataset(records, connection=connection)
    yield data
    data.close()


def test_an_engine_that_reads_the_caches_agrees_and_its_reads_add_up(engine, dataset, tmp_path):
    ctx = dataset.context
    methods = [Dropping(policy, Rope.from_config(engine.config), 2) for policy in (Recency(), KeyDiff())]
    rows = Rows(tmp_path / "live.jsonl", LiveRow)
    served = Served(engine, ctx)
    scorer = LiveScorer(ctx, served, engine, 5)
    score_live(scorer, dataset, methods, [0.5], rows)
    assert len(served.params) == 2 * 3 * 5
    assert all(p["max_tokens"] == 1 and p["logprobs"] == 1 and "prompt_logprobs" not in p for p in served.params)
    for place in range(2):
        for key, chunks in ((full_key(place), 6), ((place, "keydiff", "r1", 0.5), 3)):
            row = rows[key]
            assert row.nll == pytest.approx(row.offline_nll, abs=1e-3)
            assert (row.read_chunks, row.expected_chunks, row.tokens) == (5 * chunks, 5 * chunks, 5)
    score_live(scorer, dataset, methods, [0.5], rows)
    assert len(served.params) == 2 * 3 * 5  # none twice

    decoded = decode_live(scorer, dataset, methods, [0.5])
    assert set(decoded) == {("full", 1.0), ("recency", 0.5), ("keydiff", 0.5)}
    assert all(arm.all_hits and len(arm.continuations[0]) == 64 for arm, _ in decoded.values())
    sample = dataset[0]
    assert ctx.lookup(*compressed_address(sample["tokens"].tolist(), 96, "keydiff")) == 0
    keys = [full_key(0), full_key(1), (0, "keydiff", "r1", 0.5), (1, "keydiff", "r1", 0.5)]
    full, keydiff = live_results([rows[key] for key in keys], decoded)
    assert full.delta_nll == full.offline_delta_nll == 0
    assert keydiff.delta_nll == pytest.approx(keydiff.offline_delta_nll, abs=2e-3)
    assert keydiff.gap_ci90[0] <= keydiff.delta_nll - keydiff.offline_delta_nll <= keydiff.gap_ci90[1]
    assert (keydiff.read_chunks, keydiff.expected_chunks, keydiff.all_hits) == (30, 30, True)
    assert keydiff.gain == pytest.approx(keydiff.decode_tput / full.decode_tput)


def test_scored_tokens_never_fill_another_chunk(engine, dataset):
    sample = dataset[0]
    scorer = LiveScorer(dataset.context, Served(engine, dataset.context), engine, 1000)
    about = {"window": 0, "policy": "full", "revision": "", "keep": 1.0, "kept_tokens": 192}
    address = sample["tokens"].tolist(), sample["salt"]
    row = scorer.row(about, address, sample["kv"], torch.randint(96, (90,)))
    assert row.tokens == 31


def test_log_probabilities_come_over_http(engine, dataset):
    """The fake answers 100, -0.5 to whatever is asked."""
    vllm = FakeVLLM()
    sample = dataset[0]
    following = torch.tensor([1, 100, 100])
    about = {"window": 0, "policy": "full", "revision": "", "keep": 1.0, "kept_tokens": 192}
    address = [1, 2, 3], "salt"
    with serving(vllm) as url, openai_completion(url, MODEL) as complete:
        events = list(complete(*address[:1], {"max_tokens": 1, "logprobs": 1}, "salt"))
        assert [(e.token_id, e.logprob) for e in events] == [(100, -0.5)]
        (plain,) = complete([1], {"max_tokens": 1})
        assert plain.logprob is None
        scorer = LiveScorer(dataset.context, complete, engine, 9)
        with pytest.raises(ProtocolError, match="allowed_token_ids"):
            scorer.row(about, address, sample["kv"], torch.tensor([1, 5]))
        found = list(scorer._logprobs(*address, following.tolist()))
    assert found == [-0.5, -0.5]
    assert [body["prompt"] for body in vllm.bodies[-2:]] == [[1, 2, 3, 1], [1, 2, 3, 1, 100]]
    last = vllm.bodies[-1]
    assert (last["cache_salt"], last["max_tokens"], last["allowed_token_ids"]) == ("salt", 1, [100])
    assert (last["logprobs"], "prompt_logprobs" in last) == (1, False)
